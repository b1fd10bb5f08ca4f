"""What the tests of the connector share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import Engine, run, write_model
from vllm.v1.request import Request, RequestStatus

FOR_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@contextmanager
def pair(tmp_path: Path, key: Path, ports: list[int], **settings: Any) -> Iterator[tuple[Engine, Engine]]:
    """A producer and a consumer of one model; `p` and `d` are what is special to one of them."""
    model = write_model(tmp_path / "model")
    special = {"p": settings.pop("p", {}), "d": settings.pop("d", {})}
    p = Engine(model, key, "kv_producer", ports[0], **settings | special["p"])
    d = Engine(model, key, "kv_consumer", ports[1], **settings | special["d"])
    try:
        yield p, d
    finally:
        p.close()
        d.close()


def prefilled(p: Engine, prompt: int, seed: int = 1) -> dict[str, Any]:
    """A prompt that the producer has read: what goes to the consumer."""
    request = p.add(prompt, dict(FOR_DECODE), tokens=1, seed=seed)
    run(p, until=lambda: request.is_finished())
    ticket = p.tickets[request.request_id]
    assert ticket is not None and ticket["do_remote_prefill"] and ticket["remote_request_id"] == request.request_id
    return ticket


def waits(d: Engine, request: Request) -> bool:
    """Whether a request waits for its cache."""
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


def both_idle(p: Engine, d: Engine, patience: float = 20.0) -> None:
    """Both come to rest, with nothing left."""
    run(p, d, until=lambda: p.idle and d.idle, patience=patience)


def holdings() -> dict[str, int]:
    """What this process holds of the system."""
    tasks = os.listdir("/proc/self/task")
    children = [Path(f"/proc/self/task/{task}/children") for task in tasks]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": len(tasks),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": sum(len(path.read_text().split()) for path in children if path.exists()),
        # Of memory that others see, too: what the allocator maps is its own affair.
        "shared mappings": sum(line.split(maxsplit=2)[1].endswith("s") for line in maps),
    }


def holds_no_more_than(before: dict[str, int], *engines: Engine, within: float = 5.0) -> None:
    """What was of the dead is let go of, at the latest so many seconds after: nothing is left of it."""
    until = time.monotonic() + within
    while True:
        now = holdings()
        if all(count <= before[name] for name, count in now.items()):
            return
        assert time.monotonic() < until, f"{before} before, {now} after"
        for engine in engines:
            engine.step()
        time.sleep(0.01)
