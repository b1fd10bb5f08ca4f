"""What a deployment may set, and what is said where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvx
from kvx.vllm import compat, config
from kvx.vllm.config import Settings


def read(key: Path | None, extra: dict[str, Any] | None = None, **environment: str) -> Settings:
    """The settings of a producer."""
    named = {"key_file": str(key)} if key else {}
    return config.read(named | (extra or {}), environment, engine="e", role="kv_producer", replica=2)


def test_a_deployment_of_nixl_needs_nothing_but_a_key(key: Path) -> None:
    settings = read(
        None,
        {"backends": ["UCX"], "kv_lease_duration": 12, "num_threads": 4},
        KVX_KEY_FILE=str(key),
        VLLM_NIXL_SIDE_CHANNEL_HOST="10.0.0.7",
        VLLM_NIXL_SIDE_CHANNEL_PORT="6000",
    )
    # Each data parallel replica has a port of its own.
    assert (settings.address, settings.lease_s, settings.keys) == ("10.0.0.7:6002", 12.0, (str(key),))
    assert (settings.produces, settings.consumes) == (True, False)
    assert [warning.split()[0] for warning in settings.warnings] == ["backends", "num_threads"]
    assert read(key).address == "localhost:5602"


def test_kvx_has_settings_of_its_own(key: Path) -> None:
    settings = read(key, {"host": "fd00::1", "port": 7000, "backend": "ucx,tls=tcp", "lease_s": 3, "idle_wait_ms": 0.5})
    assert (settings.address, settings.backend, settings.lease_s) == ("[fd00::1]:7002", "ucx,tls=tcp", 3.0)
    assert settings.idle_wait_s == 0.0005


@pytest.mark.parametrize(
    ("extra", "environment", "named"),
    [
        ({}, {}, "write_new"),
        ({"key_file": "/nowhere/key"}, {}, "/nowhere/key"),
        ({"key_file": 7}, {}, "key_file"),
        ({"kv_lease": 5}, {}, "'kv_lease'"),
        ({"lease_s": -1}, {}, "lease_s"),
        ({"lease_s": True}, {}, "lease_s"),
        ({"port": "x"}, {}, "port"),
        ({"port": 70_000}, {}, "70000"),
        ({"host": "0.0.0.0"}, {}, "nobody can dial"),
        ({"digests": "yes"}, {}, "digests"),
        ({}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "x"}, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    ],
)
def test_what_is_wrong_is_named(key: Path, extra: dict[str, Any], environment: dict[str, str], named: str) -> None:
    if named != "write_new" and "key_file" not in extra:
        extra = extra | {"key_file": str(key)}
    with pytest.raises(kvx.ConfigError, match=named):
        config.read(extra, environment, engine="e", role="kv_both")


def test_an_old_vllm_is_told_what_it_lacks() -> None:
    class Old:
        """A base class of before."""

        get_handshake_metadata = None

    with pytest.raises(compat.UnsupportedVllmError, match="0[.]11[.]0.*build_connector_worker_meta.*0[.]32[.]0"):
        compat.check("0.11.0", Old)
    whole = type("Whole", (), dict.fromkeys(compat.NEEDED))
    assert compat.check("0.32.0+cpu", whole) is None
    assert "not tested with vLLM 0.99.0" in (compat.check("0.99.0", whole) or "")


def test_the_package_needs_no_vllm() -> None:
    """Importing it is one thing; asking for the connector is another."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import kvx.vllm, kvx.vllm.layout, kvx.vllm.scheduler, kvx.vllm.config\n"
        "try: kvx.vllm.KvxConnector\n"
        "except ImportError as error: print('asked for', error.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("asked for vllm")
