"""Aborts at each moment, preemptions, and loads that fail."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, Engine, run
from kit import FOR_DECODE, both_idle, pair, prefilled, waits
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


def ended_lease(ticket: dict[str, Any]) -> dict[str, Any]:
    """The ticket, with a lease that the producer never granted."""
    ticket = copy.deepcopy(ticket)
    owner, _ = ticket["kvx"]["lease"].split("/")
    ticket["kvx"]["lease"] = f"{owner}/999.0"
    return ticket


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails(tmp_path: Path, key: Path, ports: list[int], policy: str) -> None:
    with pair(tmp_path, key, ports, policy=policy, d={"extra": {"retries": 0}}) as (p, d):
        had = d.add(BLOCK + 8, prefilled(p, BLOCK + 8))
        run(p, d, until=had.is_finished)
        ticket = prefilled(p, 100)
        request = d.add(100, ended_lease(ticket))
        run(p, d, until=request.is_finished)
        if policy == "fail":
            assert request.status == RequestStatus.FINISHED_ERROR
        else:
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            # The first block was a hit; the rest is computed, and two tokens more.
            assert d.computed[request.request_id] == 100 - BLOCK + 2
        # The lease that was granted is still there: its true user comes.
        right = d.add(100, ticket)
        run(p, d, until=right.is_finished)
        assert right.status == RequestStatus.FINISHED_LENGTH_CAPPED
        both_idle(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_where_blocks_say_nothing(tmp_path: Path, key: Path, ports: list[int], policy: str) -> None:
    """With several groups a block's number is no request's: the request is named."""
    with pair(tmp_path, key, ports, policy=policy, windows=(None, 2 * BLOCK), d={"extra": {"retries": 0}}) as (p, d):
        ticket = prefilled(p, 100)
        request = d.add(100, ended_lease(ticket))
        run(p, d, until=request.is_finished)
        failed = policy == "fail"
        assert request.status == (RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_LENGTH_CAPPED)
        assert d.computed.get(request.request_id, 0) == (0 if failed else 100 + 2)
        right = d.add(100, ticket)
        run(p, d, until=right.is_finished)
        both_idle(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("spoil", ["no kvx", "other schema", "no address", "not a ticket"])
def test_a_ticket_that_is_of_no_use(
    tmp_path: Path, key: Path, ports: list[int], policy: str, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(tmp_path, key, ports, policy=policy) as (p, d):
        ticket = copy.deepcopy(good := prefilled(p, 100))
        match spoil:
            case "no kvx":
                del ticket["kvx"]
            case "other schema":
                ticket["kvx"]["schema"] = [90, 91]
            case "no address":
                del ticket["remote_host"]
            case _:
                ticket["kvx"] = {"schema": [1, 1], "lease": 5}
        d.connector._scheduler  # noqa: B018 - there is one
        import logging

        logging.getLogger("kvx").propagate = True
        request = d.add(100, ticket)
        run(d, until=request.is_finished)
        expected = RequestStatus.FINISHED_ERROR if policy == "fail" else RequestStatus.FINISHED_LENGTH_CAPPED
        assert request.status == expected
        right = d.add(100, good)
        run(p, d, until=right.is_finished)
        both_idle(p, d)


def test_an_abort_before_it_is_scheduled_gives_the_lease_back(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        request = d.add(100, prefilled(p, 100))
        d.abort(request)
        assert d.scheduler.has_requests(), "vLLM would not step, and the producer hold its blocks"
        both_idle(p, d)


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_at_each_step_of_a_consumer(tmp_path: Path, key: Path, ports: list[int], steps: int) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        for seed in range(1, 6):
            request = d.add(300, prefilled(p, 300, seed), seed=seed)
            for _ in range(steps):
                d.step()
            if not request.is_finished():
                d.abort(request)
            both_idle(p, d)


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_at_each_step_of_a_producer(tmp_path: Path, key: Path, ports: list[int], steps: int) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        request = p.add(200, dict(FOR_DECODE), tokens=1)
        for _ in range(steps):
            p.step()
        if not request.is_finished():
            p.abort(request)
            assert p.free == p.free_at_start
        else:
            decoded = d.add(200, p.tickets[request.request_id])
            run(p, d, until=decoded.is_finished)
        both_idle(p, d)


def test_blocks_stay_pinned_while_a_load_may_write_them(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        request = d.add(100, prefilled(p, 100))
        meta_before = d.free
        plan = d.scheduler.schedule()
        assert waits(d, request)
        d.abort(request)
        assert d.free == meta_before - 4, "blocks were given away before the load had ended"
        # The step whose plan was made goes on.
        d.scheduler.schedule = lambda: (d.scheduler.__dict__.pop("schedule"), plan)[1]  # type: ignore[method-assign]
        d.step()
        both_idle(p, d)


def test_an_abort_between_two_tries(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """The load has failed and waits to be tried again: nothing is written, and vLLM must be told so all the same."""
    with pair(tmp_path, key, ports, d={"extra": {"retries": 5, "backoff_s": 30}}) as (p, d):
        ticket = prefilled(p, 100)
        p.close()
        request = d.add(100, ticket)
        stats = d.connector._scheduler.stats
        run(d, until=lambda: stats()["retries"] == 1, patience=60)
        assert waits(d, request)
        d.abort(request)
        run(d, until=lambda: d.idle, patience=60)


def test_a_lease_that_nobody_wants_ends_in_time(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports, p={"extra": {"lease_s": 0.3}}) as (p, d):
        ticket = prefilled(p, 100)
        run(p, until=lambda: p.idle)
        assert p.connector._scheduler.stats()["expired"] == 1
        request = d.add(100, ticket)
        run(p, d, until=request.is_finished)
        assert request.status == RequestStatus.FINISHED_ERROR
        both_idle(p, d)


def test_a_request_that_waits_long_keeps_its_lease(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """It is extended from when the request has come, also while there are no blocks for it."""
    import time

    with pair(tmp_path, key, ports, p={"extra": {"lease_s": 0.5}}, d={"blocks": 6}) as (p, d):
        other = d.add(140, None, tokens=10_000, seed=9)
        d.step()
        request = d.add(140, prefilled(p, 140))
        end = time.monotonic() + 2
        while time.monotonic() < end:
            p.step()
            d.step()
        assert not waits(d, request)
        d.abort(other)
        run(p, d, until=request.is_finished)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED and d.computed[request.request_id] == 3
        both_idle(p, d)


def test_a_preempted_producer_publishes_what_it_computes_anew(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        request = p.add(150, dict(FOR_DECODE), tokens=1)
        p.step()
        p.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert request.status == RequestStatus.PREEMPTED
        run(p, until=request.is_finished)
        ticket = p.tickets[request.request_id]
        assert ticket is not None
        decoded = d.add(150, ticket)
        d.step()
        tables = d.blocks_of(decoded)
        run(p, d, until=lambda: not waits(d, decoded))
        assert d.right(decoded, tables, range(149))
        run(p, d, until=decoded.is_finished)
        both_idle(p, d)


def test_a_preempted_consumer_computes_what_it_lost(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports, caching=False) as (p, d):
        request = d.add(100, prefilled(p, 100), tokens=5)
        run(p, d, until=lambda: request.num_output_tokens == 2)
        d.scheduler.reset_prefix_cache(reset_running_requests=True)
        run(p, d, until=request.is_finished)
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        both_idle(p, d)


def test_two_requests_with_one_ticket(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """A router that repeats a request: the second computes what the first did not leave it."""
    with pair(tmp_path, key, ports) as (p, d):
        ticket = prefilled(p, 100)
        requests = [d.add(100, copy.deepcopy(ticket)) for _ in range(2)]
        run(p, d, until=lambda: all(request.is_finished() for request in requests))
        assert [request.status for request in requests] == [RequestStatus.FINISHED_LENGTH_CAPPED] * 2
        both_idle(p, d)


def test_one_failure_harms_no_other_request(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports, d={"extra": {"retries": 0}}) as (p, d):
        tickets = [prefilled(p, 100, seed) for seed in range(1, 5)]
        tickets[1] = ended_lease(spoilt := tickets[1])
        requests = [d.add(100, ticket, seed=seed) for seed, ticket in enumerate(tickets, 1)]
        run(p, d, until=lambda: all(request.is_finished() for request in requests))
        good, bad = RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ERROR
        assert [request.status for request in requests] == [good, bad, good, good]
        again = d.add(100, spoilt, seed=2)
        run(p, d, until=again.is_finished)
        both_idle(p, d)


def test_what_is_counted_is_what_was_done(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        found: dict[str, int] = {}

        def count(output: KVConnectorOutput) -> None:
            for name, value in (output.kv_connector_stats.data if output.kv_connector_stats else {}).items():
                found[name] = found.get(name, 0) + value

        d.spoil = count
        engine: Engine
        for seed in (1, 2):
            request = d.add(100, prefilled(p, 100, seed), seed=seed)
            run(p, d, until=request.is_finished)
        both_idle(p, d)
        d.step()
        assert found["loads"] == 2 and found["bytes"] == 2 * 4 * BLOCK * 2 * 2 * 32 * 2
        assert d.connector._scheduler.stats()["received"] == 2 and p.connector._scheduler.stats()["sent"] == 2
