"""Moves a request's KV cache from the engine that filled it to the engine that needs it.

``backends()`` says what can move bytes here, what cannot, and how to get it. Errors are in ``kvx.errors``.
"""

from ._backends import Backend, Backends, backends
from ._kvx import __version__
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
    "Backends",
    "ClosedError",
    "ConfigError",
    "FabricError",
    "InternalError",
    "KvxError",
    "MisuseError",
    "PeerError",
    "ResourcesError",
    "UnsupportedError",
    "__version__",
    "backends",
]
