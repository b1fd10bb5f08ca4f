"""Waiting for what is under way, in threads and in event loops of asyncio.

What ends something is a thread of kvx, which never touches Python: it writes to a descriptor, and the event loop reads that.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import Protocol

from . import _kvx


class Pending(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it is over."""

    def tell(self, bell: _kvx.Bell, number: int) -> None:
        """Rings ``bell`` with ``number`` when it is over."""


class _Loop:
    """What one event loop waits for."""

    def __init__(self) -> None:
        self.bell = _kvx.Bell()
        self.waiters: dict[int, asyncio.Future[None]] = {}
        self.numbers = itertools.count()

    def rung(self) -> None:
        for number in self.bell.take():
            waiter = self.waiters.pop(number, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = weakref.WeakKeyDictionary()


async def ended(pending: Pending) -> None:
    """Returns when it is over. May be cancelled, which ends nothing but the waiting."""
    if pending.done():
        return
    loop = asyncio.get_running_loop()
    known = _loops.get(loop)
    if known is None:
        known = _loops[loop] = _Loop()
    if not known.waiters:
        loop.add_reader(known.bell.fileno(), known.rung)
    number = next(known.numbers)
    waiter: asyncio.Future[None] = loop.create_future()
    known.waiters[number] = waiter
    try:
        pending.tell(known.bell, number)
        await waiter
    finally:
        known.waiters.pop(number, None)
        if not known.waiters:
            loop.remove_reader(known.bell.fileno())
