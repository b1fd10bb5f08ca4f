"""Closing, leaving, forking: in whatever order, nothing hangs, nothing crashes, nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from engines import MODEL, OPTIONS, Build, opened
from oracle import Cache, Shape

import kvx

PREFILL = Shape("flash-attention-hnd", tp=2)
DECODE = Shape("packed-nhd", tp=1, block=32)


def one_engine(name: str, shape: Shape, key: kvx.Key, backend: str, seed: int) -> tuple[kvx.Engine, Cache]:
    cache = Cache(shape, MODEL, seed)
    ranks = [
        kvx.Rank(layout, lent, [kvx.open_backend(backend, OPTIONS[backend])])
        for layout, lent in zip(cache.layouts, cache.lend(), strict=True)
    ]
    return kvx.Engine(name, cache.model, ranks, key=key), cache


def producer(pipe: Connection, secret: bytes, backend: str, tokens: int) -> None:
    """In a process of its own: publishes, and says when each lease is over."""
    prefill, cache = one_engine("producer", PREFILL, kvx.Key.from_bytes(secret), backend, seed=99)
    with prefill:
        for number in range(3):
            request = cache.request(tokens)
            blocks = cache.ids(tokens)
            cache.put(request, blocks)
            lease = prefill.publish(f"request-{number}", tokens, [blocks])
            pipe.send((lease.ticket.to_params(str(number)), request))
            pipe.send(lease.wait(60))


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_between_two_processes(build: Build, backend: str) -> None:
    opened(backend).close()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    secret = os.urandom(32)
    process = context.Process(target=producer, args=(there, secret, backend, 75))
    process.start()
    decode, ours = one_engine("consumer", DECODE, kvx.Key.from_bytes(secret), backend, seed=7)
    with decode:
        for _ in range(3):
            assert here.poll(60), "the producer says nothing"
            params, request = here.recv()
            room = ours.ids(75)
            expected = ours.copy()
            ours.put(request, room, expected)
            # As it comes out of a router: through JSON.
            reports = decode.fetch(kvx.Ticket.from_params(params), [room]).wait(60)
            assert ours.is_as(expected)
            assert {way.split("/")[0] for report in reports for way in report.transports} == {backend}
            assert here.poll(60) and here.recv() == ["done"]
    process.join(30)
    assert process.exitcode == 0


def test_a_backend_is_closed(backend: str) -> None:
    with opened(backend) as one:
        assert one.name == backend and one.chosen.startswith(f"{backend}: asked for by name")
        assert one.capabilities["host_memory"] and not one.capabilities["cuda_memory"]
        memory = one.allocate(4096)
    one.close()
    # Memory is whoever's who holds it.
    memory.view()[0] = 1
    assert memory.read(0, 1) == b"\1"


def test_what_is_closed_says_so(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    lease = prefill.publish("closed", 40, [theirs.ids(40)])
    prefill.close()
    prefill.close()
    assert prefill.closed and "closed" in repr(prefill)
    for call in (lambda: prefill.publish("more", 1, [[0]]), prefill.status, lambda: prefill.open_leases, lambda: prefill.address):
        with pytest.raises(kvx.ClosedError):
            call()
    with pytest.raises(kvx.ClosedError):
        lease.wait(5)
    lease.withdraw()


def test_closing_ends_what_is_under_way(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PREFILL), build(DECODE)
    ticket = prefill.publish("under way", 40, [theirs.ids(40)]).ticket
    prefill.close()
    fetch = decode.fetch(ticket, [ours.ids(40)])
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            fetch.wait(30)
        except kvx.KvxError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    decode.close()
    waiting.join(10)
    assert len(ended) == 1 and isinstance(ended[0], kvx.ClosedError)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("backend", ["shm", "mock"])
def test_nothing_is_left_of_engines(key: kvx.Key, backend: str) -> None:
    array = np.zeros(1 << 20, np.uint8)

    def cycle(number: int) -> None:
        with (
            one_engine(f"p{number}", PREFILL, key, backend, 1)[0] as prefill,
            one_engine(f"d{number}", DECODE, key, backend, 2)[0] as decode,
        ):
            lease = prefill.publish("cycle", 40, [[0, 1, 2]])
            decode.fetch(lease.ticket, [[0, 1]]).wait(30)
            # One that never ends, and one that nobody fetches.
            prefill.publish("left", 40, [[3, 4, 5]])
            kvx.Region.of(array)

    for number in range(2):
        cycle(number)
    gc.collect()
    count, before = sys.getrefcount(array), (descriptors(), threads())
    for number in range(2, 8):
        cycle(number)
    gc.collect()
    until = time.monotonic() + 5
    while (descriptors(), threads()) > before and time.monotonic() < until:
        time.sleep(0.05)
    assert descriptors() <= before[0] and threads() <= before[1]
    assert sys.getrefcount(array) == count


def run(script: str, root: Path, backend: str = "shm") -> subprocess.CompletedProcess[str]:
    """Runs a script that has two engines, `prefill` and `decode`, in a Python of its own."""
    begin = f"""
        import asyncio, os, sys, threading, time
        sys.path.insert(0, {str(root / "tests")!r})
        import kvx
        from oracle import Shape
        from test_life import DECODE, PREFILL, one_engine

        key = kvx.Key.generate()
        prefill, theirs = one_engine("prefill", PREFILL, key, {backend!r}, 1)
        decode, ours = one_engine("decode", DECODE, key, {backend!r}, 2)
        lease = prefill.publish("request", 40, [[0, 1, 2]])
    """
    text = textwrap.dedent(begin) + textwrap.dedent(script)
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore::DeprecationWarning", "-c", text]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


EXITS = {
    "at the end": "decode.fetch(lease.ticket, [[0, 1]]).wait(30)",
    "with a fetch under way": "fetch = decode.fetch(lease.ticket, [[0, 1]])",
    "with one that never ends": "prefill.close(); fetch = decode.fetch(lease.ticket, [[0, 1]])",
    "while a thread waits": """
        prefill.close()
        fetch = decode.fetch(lease.ticket, [[0, 1]])
        threading.Thread(target=lambda: fetch.wait(60), daemon=True).start()
        time.sleep(0.2)
    """,
    "with views of memory": """
        region = kvx.open_backend("shm").allocate(4096)
        sys.kept = region.view()
    """,
    "in a loop of asyncio": """
        prefill.close()
        async def main():
            asyncio.create_task(wait(decode.fetch(lease.ticket, [[0, 1]])))
            await asyncio.sleep(0.1)
        async def wait(fetch):
            await fetch
        asyncio.run(main())
    """,
    "in a cycle": "decode.me = decode; prefill.me = lease; lease.me = prefill; del decode, prefill, lease",
    "by sys.exit in a with": """
        with prefill, decode:
            decode.fetch(lease.ticket, [[0, 1]])
            sys.exit(0)
    """,
    "while logs are forwarded": "import logging; logging.basicConfig(level=10); kvx.forward_logs(10); kvx.record_metrics()",
}


#: What is tried with every backend.
FABRICS = ("at the end", "with a fetch under way", "with one that never ends")


@pytest.mark.parametrize(
    ("backend", "name"), [("shm", name) for name in EXITS] + [(each, name) for each in ("mock", "ucx") for name in FABRICS]
)
def test_python_ends(root: Path, backend: str, name: str) -> None:
    opened(backend).close()
    began = time.monotonic()
    ended = run(EXITS[name], root, backend)
    assert ended.returncode == 0, ended.stderr
    assert "Fatal" not in ended.stderr and "panic" not in ended.stderr
    assert time.monotonic() - began < 60


def test_a_forked_child_is_told_and_does_not_hang(root: Path) -> None:
    ended = run(
        """
        fetch = decode.fetch(lease.ticket, [[0, 1]])
        backend = kvx.open_backend("shm")
        child = os.fork()
        if child == 0:
            told = 0
            for call in (
                lambda: prefill.publish("child", 1, [[0]]), decode.status, lambda: lease.wait(5), lambda: fetch.wait(5),
                fetch.abort, lambda: backend.allocate(64), prefill.close, lease.withdraw, backend.close,
            ):
                try:
                    call()
                except kvx.MisuseError as error:
                    told += "forked" in str(error) and "spawn" in (error.remedy or "")
            # All of it is let go of, and what the child makes itself is its own.
            del prefill, decode, lease, fetch, backend, theirs, ours
            import gc; gc.collect()
            one, _ = one_engine("child", DECODE, kvx.Key.generate(), "shm", 3)
            with one:
                told += 100 * (one.open_leases == 0)
            sys.exit(0 if told == 109 else 1 + told)
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status))
        print("parent", len(fetch.wait(30)), lease.wait(30))
        """,
        root,
    )
    assert ended.stdout.split("\n")[:2] == ["child 0", "parent 1 ['done']"], ended.stderr + ended.stdout
    assert ended.returncode == 0


def test_a_second_interpreter_is_refused_by_python(root: Path) -> None:
    ended = run(
        """
        import importlib
        try:
            interpreters = importlib.import_module("_interpreters")
        except ImportError:
            interpreters = importlib.import_module("_xxsubinterpreters")
        other = interpreters.create()
        failed = None
        try:
            failed = interpreters.run_string(other, "import kvx")
        except Exception as error:
            failed = error
        print("refused" if "interpreter" in str(failed) else failed)
        """,
        root,
    )
    assert ended.stdout.strip() == "refused", ended.stderr + ended.stdout
