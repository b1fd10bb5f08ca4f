"""What is under way is waited for in threads and in event loops, given up safely, and lost by nobody."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import warnings

import pytest
from engines import Build
from oracle import Cache, Shape

import kvx

PREFILL = Shape("flash-attention-hnd", tp=2)
DECODE = Shape("packed-nhd", tp=1, block=32)
#: Large enough that a transfer takes a while: 64 MiB.
LARGE = (8, 8, 128)


def ticket_of_nobody(build: Build) -> kvx.Ticket:
    """A ticket of an engine that is gone: whoever fetches it waits for a connection."""
    prefill, theirs = build(PREFILL)
    blocks = theirs.ids(40)
    ticket = prefill.publish("nobody", 40, [blocks]).ticket
    prefill.close()
    return ticket


async def test_of_many_at_once(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    # Nothing is fetched into a block that is being written.
    rooms = [asyncio.Lock() for _ in range(24)]

    async def one(number: int) -> list[str]:
        lease = prefill.publish(f"many-{number}", 32, [[2 * number % 24, (2 * number + 1) % 24]])
        async with rooms[number % 24]:
            reports = await decode.fetch(lease.ticket, [[number % 24]])
        assert sum(report.bytes for report in reports) == 32 * theirs.model.bytes_per_token
        return await lease

    assert await asyncio.gather(*(one(number) for number in range(50))) == [["done"]] * 50
    assert (prefill.open_leases, decode.open_fetches) == (0, 0)


async def test_the_event_loop_is_not_held_up(build: Build) -> None:
    ticket = ticket_of_nobody(build)
    decode, ours = build(DECODE, deadline=0.5)
    longest, last, over = 0.0, time.monotonic(), False

    async def watch() -> None:
        nonlocal longest, last
        while not over:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    with pytest.raises(kvx.KvxError) as failed:
        await decode.fetch(ticket, [ours.ids(40)])
    over = True
    await watching
    assert failed.value.kind in ("peer", "fabric", "closed")
    assert longest < 0.4, f"the event loop stood still for {longest} s"


async def test_what_is_over_is_awaited_again(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    lease = prefill.publish("again", 40, [theirs.ids(40)])
    fetch = decode.fetch(lease.ticket, [ours.ids(40)])
    first = await fetch
    assert await fetch == first == fetch.wait() and fetch.done() and fetch.quiet()
    assert await lease == await lease == lease.wait()


async def test_a_cancelled_fetch_ends_only_when_nothing_moves(build: Build) -> None:
    big = {"model": LARGE}
    (prefill, theirs), (decode, ours) = build(PREFILL, **big), build(DECODE, **big)
    tokens = 24 * 16
    cancelled = 0
    for number in range(40):
        lease = prefill.publish(f"cancel-{number}", tokens, [list(range(24))])
        room = list(range(12))
        task = asyncio.create_task(_await(decode.fetch(lease.ticket, [room])))
        await asyncio.sleep(number * 0.0005)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            cancelled += 1
        # The blocks are ours again: nobody writes into what is put there now.
        for array in ours.memory[0]:
            array[:] = number
        lease.withdraw()
        await lease
        assert all((array == number).all() for array in ours.memory[0])
    assert cancelled > 3
    assert (prefill.open_leases, decode.open_fetches) == (0, 0)


async def _await(fetch: kvx.Fetch) -> list[kvx.FetchReport]:
    return await fetch


async def test_cancelled_while_it_waits_for_a_connection(build: Build) -> None:
    ticket = ticket_of_nobody(build)
    decode, ours = build(DECODE)
    began = time.monotonic()
    fetch = decode.fetch(ticket, [ours.ids(40)])
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_await(fetch), 0.2)
    assert time.monotonic() - began < 5
    assert fetch.done() and fetch.quiet()


def test_in_threads(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for turn in range(5):
                lease = prefill.publish(f"thread-{number}-{turn}", 32, [[2 * number, 2 * number + 1]])
                decode.fetch(lease.ticket, [[number]]).wait(30)
                assert lease.wait(30) == ["done"]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_timeout_ends_nothing_but_the_waiting(build: Build) -> None:
    ticket = ticket_of_nobody(build)
    decode, ours = build(DECODE)
    room = ours.ids(40)
    fetch = decode.fetch(ticket, [room])
    with pytest.raises(TimeoutError, match="nobody"):
        fetch.wait(0.05)
    assert not fetch.done() and not fetch.quiet()
    fetch.abort()
    with pytest.raises(kvx.ClosedError) as given_up:
        fetch.wait(5)
    assert given_up.value.blocks == {(0, block) for block in room}
    assert fetch.quiet() and not given_up.value.quarantined
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            fetch.wait(wrong)


def test_a_signal_is_heard_while_a_thread_waits(build: Build) -> None:
    ticket = ticket_of_nobody(build)
    decode, ours = build(DECODE)
    fetch = decode.fetch(ticket, [ours.ids(40)])
    began = time.monotonic()
    # Where a shell has started this behind itself, Python was told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
            fetch.wait(20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    fetch.abort()
    with pytest.raises(kvx.ClosedError):
        fetch.wait(5)


def test_a_fetch_that_is_let_go_of_is_given_up_and_says_so(build: Build) -> None:
    ticket = ticket_of_nobody(build)
    decode, ours = build(DECODE, deadline=1)
    with pytest.warns(ResourceWarning, match="let go of before it was over"):
        fetch = decode.fetch(ticket, [ours.ids(40)])
        del fetch
        gc.collect()
    # It would give the lease back to whoever is not there, and stops trying to when its time is up.
    until = time.monotonic() + 20
    while decode.open_fetches and time.monotonic() < until:
        time.sleep(0.01)
    assert decode.open_fetches == 0


def test_one_that_is_over_is_let_go_of_in_silence(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    lease = prefill.publish("silence", 40, [theirs.ids(40)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode.fetch(lease.ticket, [ours.ids(40)]).wait(30)
        gc.collect()


def test_a_lease_that_is_withdrawn(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    lease = prefill.publish("withdrawn", 40, [theirs.ids(40)])
    with pytest.raises(TimeoutError, match="withdrawn"):
        lease.wait(0.05)
    lease.withdraw("preempted")
    assert lease.wait(5) == ["preempted"]
    room = ours.ids(40)
    with pytest.raises(kvx.PeerError) as refused:
        decode.fetch(lease.ticket, [room]).wait(30)
    assert refused.value.blocks == {(0, block) for block in room}
    assert refused.value.reason == "preempted" and refused.value.remedy
    with pytest.raises(ValueError, match="preempted"):
        lease.withdraw("whatever")  # type: ignore[arg-type]


def test_nobody_comes(build: Build) -> None:
    prefill, theirs = build(PREFILL, ttl=0.3)
    lease = prefill.publish("nobody comes", 40, [theirs.ids(40)])
    assert lease.wait(10) == ["expired"]


def test_two_engines_that_do_not_mean_the_same(build: Build) -> None:
    prefill, theirs = build(PREFILL, facts={"model": "one", "revision": "a"})
    for shape, model, facts, named in (
        (DECODE, (3, 4, 16), {"model": "another", "revision": "a"}, "model"),
        (DECODE, (3, 4, 32), {"model": "one", "revision": "a"}, "head_dim"),
    ):
        decode, ours = build(shape, model=model, facts=facts)
        lease = prefill.publish(f"unlike in {named}", 40, [theirs.ids(40)])
        with pytest.raises(kvx.KvxError, match=named) as refused:
            decode.fetch(lease.ticket, [ours.ids(40)]).wait(30)
        assert refused.value.retry == "never"
        lease.withdraw()
        assert lease.wait(5)


def test_another_key(build: Build) -> None:
    prefill, theirs = build(PREFILL)
    cache = Cache(DECODE, (3, 4, 16), seed=1)
    rank = kvx.Rank(cache.layouts[0], cache.lend()[0], [kvx.open_backend("shm")])
    lease = prefill.publish("another key", 40, [theirs.ids(40)])
    with kvx.Engine("stranger", cache.model, [rank], key=kvx.Key.generate(), deadline=3) as stranger:
        with pytest.raises(kvx.KvxError):
            stranger.fetch(lease.ticket, [cache.ids(40)]).wait(30)
    assert lease.ticket.tokens == 40 and not lease.done()
