"""Which versions of vLLM the connector knows."""

from __future__ import annotations

#: Versions that the project's tests have run against, and with which device.
TESTED: dict[str, str] = {"0.32.0": "cpu"}

#: What the connector calls or overrides that older base classes lack. A version that has all of it is tried, tested or not.
NEEDED = (
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "get_loaded_kv_cache_group_ids",
    "get_transfer_results",
    "has_pending_push_work",
    "on_new_request",
    "set_xfer_handshake_metadata_pp_aware",
)


class UnsupportedVllmError(ImportError):
    """This vLLM's connectors lack something that kvx builds on."""


def missing(base: type) -> list[str]:
    """What of :data:`NEEDED` vLLM's base class of connectors lacks."""
    return [name for name in NEEDED if not hasattr(base, name)]


def plain(version: str) -> str:
    """A version without what a build added to it: ``0.32.0+cpu`` is ``0.32.0``."""
    return version.split("+", 1)[0]


def check(version: str, base: type) -> str | None:
    """Refuses a vLLM that cannot work; returns a warning for one that was never tried.

    Raises:
        UnsupportedVllmError: naming the version, what it lacks, and the versions that were tested.
    """
    tested = ", ".join(TESTED)
    lacking = missing(base)
    if lacking:
        raise UnsupportedVllmError(
            f"kvx.vllm cannot run under vLLM {version}: its KVConnectorBase_V1 has no {', '.join(lacking)}; "
            f"install a version that was tested with kvx: {tested}"
        )
    if plain(version) in TESTED:
        return None
    return f"kvx.vllm was not tested with vLLM {version}, only with {tested}; it goes on, as nothing that it needs is missing"
