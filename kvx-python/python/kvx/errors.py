"""What kvx raises.

Every error is a :class:`KvxError`. There is one class for each kind, so that ``except`` can tell who is to blame; what else is
known is in attributes. An argument of the wrong type is a ``TypeError``, one of the wrong value a ``ValueError``, which
:class:`MisuseError` and :class:`ConfigError` are, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["misuse", "peer", "fabric", "resources", "unsupported", "config", "closed", "internal"]
Retry = Literal["never", "backoff", "reconnect"]


class KvxError(Exception):
    """An error of kvx. Its text is one line: the operation, what was wrong, where, and the remedy if one is known."""

    #: Who is to blame: the name of the class in a word.
    kind: Kind = "internal"
    #: What may be done: ``never`` (trying again cannot help), ``backoff`` (the same call may work later; wait, and longer each
    #: time) or ``reconnect`` (the connection is lost; it is made again by the next call).
    retry: Retry = "never"
    #: The operation that failed, such as ``register``.
    operation: str = ""
    #: The backend in which it arose, if it was one.
    backend: str | None = None
    #: The code of a vendor's library or of the operating system, if there was one.
    code: int | None = None
    #: What a person can do about it, if that is known.
    remedy: str | None = None
    #: What was wrong, without operation, context or remedy.
    message: str = ""
    #: Facts about where it happened.
    context: Mapping[str, str]
    #: Where two sides disagree: the field, and what each has.
    mismatch: tuple[str, str, str] | None = None
    #: Of a fetch that failed: this engine's blocks that are not proven good, as (cache group, id).
    blocks: frozenset[tuple[int, int]] = frozenset()
    #: Of a fetch that failed: whether something may still move in its blocks. They must not be used before ``Fetch.quiet`` says so.
    quarantined: bool = False
    #: Of a fetch that failed because its lease had ended: why that was, as ``Lease.wait`` tells the other side.
    reason: str | None = None

    def __init__(self, text: str = "", **facts: Any) -> None:
        super().__init__(text)
        self.context = {}
        self.message = text
        for name, value in facts.items():
            if not hasattr(self, name):
                raise TypeError(f"an error of kvx has no {name!r}")
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args, self.__dict__)


class MisuseError(KvxError, ValueError):
    """A rule of the API was broken: the order of calls, or what an argument may be. Never caused by what a peer sent."""

    kind = "misuse"


class PeerError(KvxError):
    """The other side sent something wrong, or is gone."""

    kind = "peer"


class FabricError(KvxError):
    """The fabric failed: a link, a device, a call of a library."""

    kind = "fabric"


class ResourcesError(KvxError):
    """Something ran out: memory, descriptors, a quota."""

    kind = "resources"


class UnsupportedError(KvxError):
    """What was asked for cannot be done by this build, this backend or this pair of layouts."""

    kind = "unsupported"


class ConfigError(KvxError, ValueError):
    """A configuration value is missing or wrong, or two engines were configured differently."""

    kind = "config"


class ClosedError(KvxError):
    """The object was closed, or the operation was cancelled."""

    kind = "closed"


class InternalError(KvxError):
    """A bug in kvx. Please report it."""

    kind = "internal"


_CLASSES: dict[str, type[KvxError]] = {
    one.kind: one
    for one in (
        MisuseError,
        PeerError,
        FabricError,
        ResourcesError,
        UnsupportedError,
        ConfigError,
        ClosedError,
        InternalError,
    )
}


def _of(text: str, *, kind: str, **facts: Any) -> KvxError:
    """The exception of a kind; called by the native module."""
    return _CLASSES.get(kind, KvxError)(text, **facts)
