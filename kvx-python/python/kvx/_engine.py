"""An engine in one process: it publishes what it has computed, and fetches what others have."""

from __future__ import annotations

import asyncio
import atexit
import time
import warnings
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, SupportsIndex

from . import _kvx
from ._kvx import Backend, Key, Layout, Model, Region, Ticket
from ._waiting import ended
from .errors import KvxError

#: How often it is looked whether blocks are quiet, in seconds.
_LOOK = 0.02
#: How long a fetch that was cancelled waits for its blocks to be quiet after it has ended, in seconds.
_QUIET = 10.0


@dataclass(frozen=True)
class Table:
    """A request's blocks in one cache group, where they do not begin with the request's first block."""

    #: Ids of logical blocks.
    ids: Sequence[SupportsIndex]
    #: The request's logical block number that the first id stands for.
    first: int = 0


#: A request's blocks: for each cache group the ids of its logical blocks, in order.
Blocks = Sequence[Sequence[SupportsIndex] | Table]


@dataclass(frozen=True)
class Rank:
    """One rank of an engine: a layout, and what it is registered with."""

    #: Where everything lies.
    layout: Layout
    #: Its memory, in the layout's order.
    regions: Sequence[Region]
    #: What moves bytes, and can reach the regions. One may serve several ranks.
    backends: Sequence[Backend]

    @classmethod
    def allocate(cls, layout: Layout, backend: Backend) -> Rank:
        """A rank whose memory ``backend`` allocates: zeroed, of the kind that it moves fastest."""
        return cls(layout, [backend.allocate(nbytes) for nbytes in layout.region_bytes], [backend])


@dataclass(frozen=True)
class FetchReport:
    """What one rank has moved. Times are in seconds."""

    #: Bytes moved.
    bytes: int
    #: Segments posted.
    segments: int
    #: Transfers done.
    transfers: int
    #: Backends and transports used, as ``backend/transport``.
    transports: list[str]
    #: From the call until the other engine's ranks were connected.
    routing: float
    #: From the first transfer's post until the last one had settled.
    moving: float
    #: From the call until the end.
    elapsed: float


def open_backend(name: str | None = None, options: Mapping[str, object] | None = None) -> Backend:
    """Opens a backend: the one of this ``name``, else the one that ``KVX_BACKEND`` names, else the best that can be used here.

    ``options`` are the backend's own: ``kvx backends NAME`` lists them.
    """
    if options and name is None:
        raise ValueError("options are for a backend that is named: pass its name, too")
    return _kvx.open_backend(name, [(key, _text(value)) for key, value in (options or {}).items()])


def _text(value: object) -> str:
    # As options are written everywhere else.
    return str(value).lower() if isinstance(value, bool) else str(value)


class Lease:
    """A request's blocks under a lease. They must stay as they are (or, where they are to be written, must not be used) until it is over.

    Awaited, it is over: ``reasons = await lease``. ``wait`` does the same in a thread.
    """

    def __init__(self, native: _kvx.Lease) -> None:
        self._native = native
        self._ticket = native.ticket

    @property
    def ticket(self) -> Ticket:
        """What the other engine is given."""
        return self._ticket

    def withdraw(self, why: Literal["aborted", "preempted", "failed"] = "aborted") -> None:
        """Takes the blocks back: whoever uses them is told at once. They are free when the lease is over."""
        self._native.withdraw(why)

    def done(self) -> bool:
        """Whether it is over, and its blocks may be used again."""
        return self._native.done()

    def wait(self, timeout: float | None = None) -> list[str]:
        """Waits until it is over. Gives why it ended: ``["done"]`` where it did what it was for.

        Raises ``TimeoutError`` after ``timeout`` seconds, and :class:`kvx.ClosedError` where the engine was closed.
        """
        if not self._native.wait(timeout):
            raise TimeoutError(f"the lease on {self._ticket.key!r} is not over after {timeout} s")
        return self._reasons()

    def __await__(self) -> Generator[Any, None, list[str]]:
        yield from ended(self._native).__await__()
        return self._reasons()

    def _reasons(self) -> list[str]:
        reasons = self._native.outcome()
        assert reasons is not None
        return reasons

    def __repr__(self) -> str:
        return f"<Lease on {self._ticket.key!r}, {'over' if self.done() else 'held'}>"


class Fetch:
    """A request under way. Its blocks are in use until it is over.

    Awaited, it gives what each rank has moved: ``reports = await fetch``; ``wait`` does the same in a thread. Where it fails, what is
    raised has the ``blocks`` that are not proven good, as (cache group, id).

    Where the task that awaits it is cancelled, the fetch is given up, and the cancellation goes on only when nothing moves in the
    blocks any more.
    """

    def __init__(self, native: _kvx.Fetch, key: str, blocks: frozenset[tuple[int, int]]) -> None:
        self._native = native
        self._key = key
        self._blocks = blocks

    def abort(self) -> None:
        """Gives it up. It still has to be waited for: its blocks are in use until it is over."""
        self._native.abort()

    def done(self) -> bool:
        """Whether it is over."""
        return self._native.done()

    def quiet(self) -> bool:
        """Whether it is over and nothing can move in its blocks any more.

        The two differ only where what was raised is ``quarantined``.
        """
        return self._native.quiet()

    def wait(self, timeout: float | None = None) -> list[FetchReport]:
        """Waits until it is over. Gives what each rank has moved.

        Raises ``TimeoutError`` after ``timeout`` seconds, and then goes on: wait again, or give it up and wait. Otherwise a
        :class:`kvx.KvxError` says why nothing was moved.
        """
        if not self._native.wait(timeout):
            raise TimeoutError(f"the fetch of {self._key!r} is not over after {timeout} s")
        return self._reports()

    def __await__(self) -> Generator[Any, None, list[FetchReport]]:
        return self._ended().__await__()

    async def _ended(self) -> list[FetchReport]:
        try:
            await ended(self._native)
        except asyncio.CancelledError:
            self.abort()
            await self._settle()
            raise
        return self._reports()

    async def _settle(self) -> None:
        """Waits until nothing moves, whoever cancels that."""
        until: float | None = None
        while not self.quiet():
            if until is None and self.done():
                until = time.monotonic() + _QUIET
            if until is not None and time.monotonic() > until:
                warnings.warn(
                    f"blocks of the fetch of {self._key!r} are still in quarantine: use them when quiet() says so",
                    ResourceWarning,
                    stacklevel=2,
                )
                return
            try:
                await (asyncio.sleep(_LOOK) if self.done() else ended(self._native))
            except asyncio.CancelledError:
                continue

    def _reports(self) -> list[FetchReport]:
        try:
            reports = self._native.outcome()
        except KvxError as error:
            if not error.blocks:
                # Where it is not known which are good, none is.
                error.blocks = self._blocks
            raise
        assert reports is not None
        return [FetchReport(**report) for report in reports]

    def __del__(self) -> None:
        try:
            lost = not self._native.done()
        except (AttributeError, KvxError):
            # It never began, or this is a child of the process that began it.
            return
        if lost:
            warnings.warn(
                f"the fetch of {self._key!r} was let go of before it was over: it is given up, and nobody is told when its blocks "
                "may be used",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        return f"<Fetch of {self._key!r}, {'over' if self.done() else 'under way'}>"


class Engine:
    """All ranks of one replica of an engine, in this process.

    One engine publishes a request's blocks, and gives the ticket to the one that needs them, which fetches::

        lease = prefill.publish("request-1", tokens, [blocks])
        reports = await decode.fetch(lease.ticket, [room])
        assert await lease == ["done"]

    Calls may come from any thread. None waits for the network. Close it, or use it in a ``with`` statement.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        ranks: Sequence[Rank],
        *,
        key: Key | Sequence[Key] | None = None,
        plaintext: Literal["loopback", "anywhere"] | None = None,
        listen: str = "127.0.0.1:0",
        facts: Mapping[str, object] | None = None,
        ttl: float = 30.0,
        hard: float = 3600.0,
        deadline: float = 60.0,
        digests: bool = False,
        transports: Sequence[str] | None = None,
    ) -> None:
        """Starts it.

        :param name: its name: engines that talk to each other have different ones.
        :param model: what it keeps per token.
        :param ranks: all ranks of the replica, by pipeline stage and then by tensor parallel rank.
        :param key: what all engines of the deployment share. With several, the first is used, and the others are accepted, too.
        :param plaintext: instead of a key: whoever reaches the address is taken for an engine.
        :param listen: where it listens. Others reach it there, so name no wildcard. Port 0 takes any.
        :param facts: what must be equal on both sides besides the model's own facts, such as ``model`` and ``revision``.
        :param ttl: for how long a lease holds without a heartbeat, in seconds.
        :param hard: for how long a lease holds at most, in seconds.
        :param deadline: within which time a fetch must end, in seconds.
        :param digests: whether what was fetched is compared with what was published, byte for byte by a digest.
        :param transports: the only transports that a connection may use; a ``*`` at the end stands for any rest.
        """
        keys = [] if key is None else [key] if isinstance(key, Key) else list(key)
        stated = {**model.facts, **{name: str(value) for name, value in (facts or {}).items()}}
        self._name = name
        self._native = _kvx.Engine(
            name,
            facts=list(stated.items()),
            ranks=[(rank.layout, list(rank.regions), list(rank.backends)) for rank in ranks],
            keys=keys,
            plaintext=plaintext,
            listen=listen,
            ttl=ttl,
            hard=hard,
            deadline=deadline,
            digests=digests,
            transports=None if transports is None else list(transports),
        )
        _open.add(self)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def address(self) -> str:
        """Where it listens, and serves its cards."""
        return self._native.address

    def publish(self, key: str, tokens: int, blocks: Blocks) -> Lease:
        """Leases the blocks that hold the cache of a request's first ``tokens`` tokens, so that another engine may read them.

        ``key`` is the transfer's name on both sides. ``blocks`` has a table for each cache group. The blocks must not change
        until the lease is over.
        """
        return Lease(self._native.publish(key, tokens, blocks, False))

    def invite(self, key: str, tokens: int, blocks: Blocks) -> Lease:
        """Leases blocks for another engine to write a request's cache into, with :meth:`store`.

        They hold the request only where the lease ended as ``done``, and must not be used before it is over.
        """
        return Lease(self._native.publish(key, tokens, blocks, True))

    def fetch(self, ticket: Ticket, blocks: Blocks, tokens: range | None = None) -> Fetch:
        """Reads what ``ticket`` leases into ``blocks`` of this engine: all of it, or the ``tokens`` of this range.

        ``blocks`` has a table for each cache group. A ticket is for one fetch: one that fails gives the lease back.
        """
        return self._transfer(ticket, blocks, tokens, False)

    def store(self, ticket: Ticket, blocks: Blocks, tokens: range | None = None) -> Fetch:
        """Writes a request's cache from ``blocks`` of this engine into what ``ticket`` leases to be written (:meth:`invite`).

        The blocks must not change until it is over.
        """
        return self._transfer(ticket, blocks, tokens, True)

    def _transfer(self, ticket: Ticket, blocks: Blocks, tokens: range | None, write: bool) -> Fetch:
        if not isinstance(ticket, Ticket):
            raise TypeError(f"ticket must be a kvx.Ticket, not {type(ticket).__name__}")
        span = range(ticket.tokens) if tokens is None else tokens
        if span.step != 1:
            raise ValueError(f"tokens={tokens}: only tokens side by side can be moved")
        native = self._native.fetch(ticket, span.start, max(span.start, span.stop), blocks, write)
        return Fetch(native, ticket.key, frozenset(_named(blocks)))

    def status(self) -> dict[str, Any]:
        """What there is now at all ranks: peers, leases, requests, quarantine, and everything counted so far.

        See ``docs/metrics.md`` for the counters.
        """
        return self._native.status()

    @property
    def open_leases(self) -> int:
        """Leases that are not over, each counted at each rank."""
        return self._native.open_counts()[0]

    @property
    def open_fetches(self) -> int:
        """Fetches that are not over, or whose blocks are kept, or that were given up before the other engine could be told, each counted at
        each rank."""
        return self._native.open_counts()[1]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.closed

    def close(self) -> None:
        """Ends it: other engines are told, and its threads have ended. What is under way ends with :class:`kvx.ClosedError`.

        Memory that something may still move in is kept for as long as that is so.
        """
        self._native.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self._name!r}, {'closed' if self.closed else 'at ' + self.address}>"


def _named(blocks: Blocks) -> Iterable[tuple[int, int]]:
    for group, table in enumerate(blocks):
        for block in table.ids if isinstance(table, Table) else table:
            yield group, int(block)


_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Nothing moves any more when Python is taken apart."""
    for engine in list(_open):
        try:
            engine.close()
        except KvxError:
            # A child has its parent's engines, and nothing to close.
            pass
