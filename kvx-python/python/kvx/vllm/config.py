"""What a deployment may set: ``kv_connector_extra_config``, and the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

#: Where NixlConnector listens unless it is told otherwise: taken over, so that nothing changes but the connector's name.
DEFAULT_HOST, DEFAULT_PORT = "localhost", 5600

#: Settings of NixlConnector that mean nothing here: they are passed over with a warning, so that a deployment need not be edited.
OF_NIXL = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "kv_recompute_threshold",
        "num_threads",
    }
)


@dataclass(frozen=True)
class Settings:
    """Everything that a connector is told."""

    engine: str
    host: str
    port: int
    keys: tuple[str, ...]
    produces: bool
    consumes: bool
    recompute: bool
    key_of_group: bool = False
    backend: str | None = None
    digests: bool = False
    lease_s: float = 30.0
    hard_s: float = 900.0
    deadline_s: float = 30.0
    retries: int = 1
    backoff_s: float = 0.1
    max_requests: int = 65536
    idle_wait_s: float = 0.002
    model: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Where the engine's cards are served."""
        return join(self.host, self.port)


def join(host: str, port: int) -> str:
    """A host and a port as one text; an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def read(
    extra: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    *,
    engine: str,
    role: str,
    policy: str = "fail",
    replica: int = 0,
) -> Settings:
    """Reads ``kv_connector_extra_config`` (``extra``) and the environment.

    ``role`` is ``kv_role``, ``policy`` is ``kv_load_failure_policy``. Each of ``replica`` data parallel replicas listens at a port of its own.

    Raises:
        ConfigError: naming the setting.
    """
    take = _Extra(extra)
    lease = take.seconds("lease_s", None)
    nixl_lease = take.seconds("kv_lease_duration", None)
    keys = take.texts("key_file") or _paths(environment.get("KVX_KEY_FILE", ""))
    host = take.text("host") or environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or DEFAULT_HOST
    port = take.number("port", None)
    if port is None:
        port = _port(environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT") or str(DEFAULT_PORT))
    settings = Settings(
        engine=engine,
        host=host,
        port=port + replica,
        keys=keys,
        produces=role in ("kv_producer", "kv_both"),
        consumes=role in ("kv_consumer", "kv_both"),
        recompute=policy == "recompute",
        key_of_group=take.flag("key_file_of_group", Settings.key_of_group),
        backend=take.text("backend"),
        digests=take.flag("digests", Settings.digests),
        lease_s=next(value for value in (lease, nixl_lease, Settings.lease_s) if value is not None),
        hard_s=take.seconds("hard_s", Settings.hard_s),
        deadline_s=take.seconds("deadline_s", Settings.deadline_s),
        retries=take.number("retries", Settings.retries),
        backoff_s=take.seconds("backoff_s", Settings.backoff_s),
        max_requests=take.number("max_requests", Settings.max_requests),
        idle_wait_s=take.seconds("idle_wait_ms", Settings.idle_wait_s * 1e3) / 1e3,
        model=take.text("model"),
        warnings=take.rest(),
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    if not settings.keys:
        raise ConfigError(
            "kvx needs a key file, the same for all engines that exchange caches: make one with kvx.Key.generate().write_new(FILE) "
            'or `kvx key FILE`, and name it in kv_connector_extra_config ("key_file") or in KVX_KEY_FILE'
        )
    for path in settings.keys:
        if not os.path.isfile(path):
            raise ConfigError(f"key_file: there is no file {path}; make one with kvx.Key.generate().write_new({path!r}) or `kvx key {path}`")
    if not 0 < settings.port < 65536:
        raise ConfigError(f"port: {settings.port} is no port that others can dial; set VLLM_NIXL_SIDE_CHANNEL_PORT or port")
    if settings.host in ("0.0.0.0", "::", "*", "[::]"):
        raise ConfigError(
            f"host: nobody can dial {settings.host}; set VLLM_NIXL_SIDE_CHANNEL_HOST or host to the address by which other engines "
            "reach this one"
        )


def _port(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"VLLM_NIXL_SIDE_CHANNEL_PORT: {text!r} is not a number") from None


def _paths(text: str) -> tuple[str, ...]:
    return tuple(path for path in text.split(os.pathsep) if path)


class _Extra:
    """Takes settings out of a mapping, each once; what is left over is known to be of no meaning, or wrong."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = dict(extra)
        self._known: set[str] = set()

    def _take(self, name: str) -> Any:
        self._known.add(name)
        return self._extra.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self._take(name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name}: {value!r} is not text")
        return value or None

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._take(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list | tuple) or not all(isinstance(item, str) and item for item in values):
            raise ConfigError(f"{name}: {value!r} is neither a path nor a list of paths")
        return tuple(values)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: {value!r} is neither true nor false")
        return value

    def number(self, name: str, default: Any) -> Any:
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}: {value!r} is not a whole number, 0 or more")
        return value

    def seconds(self, name: str, default: Any) -> Any:
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}: {value!r} is not a time, 0 or more")
        return float(value)

    def rest(self) -> tuple[str, ...]:
        """What to warn of. Raises where a setting means nothing to anybody."""
        unknown = sorted(set(self._extra) - OF_NIXL)
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: kvx knows no {', '.join(map(repr, unknown))}; it knows {', '.join(sorted(self._known))}"
            )
        return tuple(f"{name} is a setting of NixlConnector that means nothing to kvx" for name in sorted(self._extra))
