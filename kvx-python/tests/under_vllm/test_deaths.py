"""One side ends in the middle of it, and comes back on the same port: the other side goes on, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, run, write_model
from kit import both_idle, holdings, holds_no_more_than, pair, prefilled
from vllm.v1.request import RequestStatus

CYCLES = int(os.environ.get("KVX_DEATHS", "5"))


@pytest.fixture(autouse=True)
def not_the_first_engine(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """vLLM and torch start threads of their own with the first engine of a process, and keep them: they are no leak of what is tested."""
    Engine(write_model(tmp_path / "first"), key, "kv_consumer", ports[2]).close()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_producer_that_dies_and_comes_back(tmp_path: Path, key: Path, ports: list[int], policy: str) -> None:
    model = write_model(tmp_path / "model")
    settings: dict[str, Any] = {"policy": policy, "caching": False}
    d = Engine(model, key, "kv_consumer", ports[1], extra={"deadline_s": 2, "retries": 1, "backoff_s": 0.01}, **settings)
    before = holdings()
    for cycle in range(CYCLES):
        p = Engine(model, key, "kv_producer", ports[0], **settings)
        tickets = [prefilled(p, 100 + 60 * seed, seed) for seed in range(1, 5)]
        requests = [d.add(100 + 60 * seed, ticket, seed=seed) for seed, ticket in enumerate(tickets, 1)]
        for _ in range(cycle % 4):
            d.step()
        p.close()
        run(d, until=lambda requests=requests: all(request.is_finished() for request in requests), patience=60)
        for request in requests:
            good = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            assert good or (policy == "fail" and request.status == RequestStatus.FINISHED_ERROR), request.status
        run(d, until=lambda: d.idle, patience=60)
        # Its successor on the same port.
        p = Engine(model, key, "kv_producer", ports[0], **settings)
        request = d.add(150, prefilled(p, 150))
        run(p, d, until=request.is_finished, patience=60)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED and d.computed[request.request_id] == 3
        both_idle(p, d)
        p.close()
    holds_no_more_than(before, d)
    d.close()


def test_a_consumer_that_dies(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """What the producer held for it comes back within the lease, and its successor is served."""
    model = write_model(tmp_path / "model")
    lease_s = 2.0
    p = Engine(model, key, "kv_producer", ports[0], extra={"lease_s": lease_s})
    before = holdings()
    for cycle in range(CYCLES):
        d = Engine(model, key, "kv_consumer", ports[1])
        for seed in range(1, 4):
            d.add(200, prefilled(p, 200, seed), seed=seed)
        for _ in range(cycle % 4):
            d.step()
        d.close()
        run(p, until=lambda: p.idle, patience=lease_s + 5)
        d = Engine(model, key, "kv_consumer", ports[1])
        request = d.add(150, prefilled(p, 150))
        run(p, d, until=request.is_finished)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        both_idle(p, d)
        d.close()
    holds_no_more_than(before, p)
    p.close()


def test_closing_with_work_at_hand_leaves_nothing(tmp_path: Path, key: Path, ports: list[int]) -> None:
    before = holdings()
    with pair(tmp_path, key, ports) as (p, d):
        ticket = prefilled(p, 100)
        d.add(100, ticket)
        d.step()
    holds_no_more_than(before)
    with pair(tmp_path, key, ports) as (p, d):
        request = d.add(100, prefilled(p, 100))
        run(p, d, until=request.is_finished)
        both_idle(p, d)
    holds_no_more_than(before)
