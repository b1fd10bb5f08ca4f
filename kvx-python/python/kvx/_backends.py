"""What can move bytes here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _kvx


@dataclass(frozen=True)
class BackendInfo:
    """A backend of this build, and whether it can be used here."""

    #: Its name, as it is chosen.
    name: str
    #: One line about it.
    about: str
    #: How good a choice it is when nobody names one: higher is better, ``None`` is never chosen unasked.
    rank: int | None
    #: Whether it can be used here.
    available: bool
    #: What was found: the library's version, devices, transports. Where it cannot be used, why.
    detail: str
    #: Where it cannot be used: what to install or change.
    remedy: str | None
    #: What it can do; empty where it cannot be used.
    capabilities: dict[str, Any]

    def __str__(self) -> str:
        state = "available" if self.available else "unavailable"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.name}: {state}: {self.detail}{remedy}"


class Backends(tuple[BackendInfo, ...]):
    """Every backend of this build, sorted by name. Printed, it says what is missing and how to get it."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def names(self, *, available: bool | None = None) -> list[str]:
        """The names of all, or of those that can (``True``) or cannot (``False``) be used here."""
        return [one.name for one in self if available is None or one.available == available]

    def named(self, name: str) -> BackendInfo:
        """The backend of this name.

        Raises ``KeyError`` where there is none.
        """
        for one in self:
            if one.name == name:
                return one
        raise KeyError(f"no backend is named {name!r}; there are {', '.join(self.names())}")


def backends() -> Backends:
    """Every backend of this build, and whether it can be used here.

    Each is asked anew, which may open its library.
    """
    return Backends(_entries(_kvx.backends()))


def _entries(found: Iterable[dict[str, Any]]) -> Iterable[BackendInfo]:
    for one in found:
        yield BackendInfo(
            name=one["name"],
            about=one["about"],
            rank=one["rank"],
            available=one["state"] == "available",
            detail=one.get("detail") or one.get("reason") or "",
            remedy=one.get("remedy"),
            capabilities=one.get("capabilities") or {},
        )
