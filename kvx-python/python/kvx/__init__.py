"""Moves a request's KV cache from the engine that filled it to the engine that needs it.

``backends()`` says what can move bytes here, what cannot, and how to get it. An :class:`Engine` publishes blocks and fetches those of
others; a :class:`Model` knows the layouts of its ranks; a :class:`Region` is memory, of kvx or of a tensor. Errors are in
``kvx.errors``.
"""

from ._backends import BackendInfo, Backends, backends
from ._engine import Blocks, Engine, Fetch, FetchReport, Lease, Rank, Table, open_backend
from ._kvx import Backend, Key, Layout, Model, Region, Ticket, __version__, metrics, record_metrics
from ._logging import forward_logs
from .errors import (
    ClosedError,
    ConfigError,
    FabricError,
    InternalError,
    KvxError,
    MisuseError,
    PeerError,
    ResourcesError,
    UnsupportedError,
)

__all__ = [
    "Backend",
    "BackendInfo",
    "Backends",
    "Blocks",
    "ClosedError",
    "ConfigError",
    "Engine",
    "FabricError",
    "Fetch",
    "FetchReport",
    "InternalError",
    "Key",
    "KvxError",
    "Layout",
    "Lease",
    "MisuseError",
    "Model",
    "PeerError",
    "Rank",
    "Region",
    "ResourcesError",
    "Table",
    "Ticket",
    "UnsupportedError",
    "__version__",
    "backends",
    "forward_logs",
    "metrics",
    "open_backend",
    "record_metrics",
]
