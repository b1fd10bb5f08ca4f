"""The life of a request on both sides, with vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import BLOCK, run
from kit import FOR_DECODE, both_idle, pair, prefilled, waits
from vllm.v1.request import RequestStatus


def test_a_producer_holds_a_chunked_prompt_until_it_is_read(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        ticket = prefilled(p, 150)
        assert len(ticket["remote_block_ids"][0]) == 5 and p.free == p.free_at_start - 5
        assert (ticket["remote_host"], ticket["remote_port"], ticket["tp_size"]) == ("127.0.0.1", ports[0], 1)
        for _ in range(5):
            p.step()
        assert p.free == p.free_at_start - 5, "it gave blocks away that nobody has read"
        request = d.add(150, ticket)
        run(p, d, until=request.is_finished)
        both_idle(p, d)


@pytest.mark.parametrize("prompt", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 150, 300])
def test_a_consumer_computes_the_last_token_alone(tmp_path: Path, key: Path, ports: list[int], prompt: int) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        ticket = prefilled(p, prompt)
        request = d.add(prompt, ticket)
        d.step()
        assert waits(d, request) and request.num_computed_tokens == prompt
        tables = d.blocks_of(request)
        run(p, d, until=lambda: not waits(d, request))
        assert d.right(request, tables, range(prompt - 1)), "what is in the cache is not what the producer had"
        run(p, d, until=request.is_finished)
        assert d.computed[request.request_id] == 1 + 2, "more than the last token and two generated ones was computed"
        both_idle(p, d)


def test_what_the_consumer_has_is_not_moved(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        for prompt, expected in ((100, 4), (200, 4), (200, 1)):
            before = d.worker._worker.side.stats()["bytes"]
            request = d.add(prompt, prefilled(p, prompt))
            run(p, d, until=lambda request=request: request.is_finished())
            block = BLOCK * 2 * 2 * 32 * 2
            assert d.worker._worker.side.stats()["bytes"] - before == expected * block
            both_idle(p, d)


def test_many_at_a_time_among_others(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        shared = [d.add(20 + 17 * seed, prefilled(p, 20 + 17 * seed, seed), seed=seed) for seed in range(1, 9)]
        alone = [d.add(40, None, seed=seed) for seed in range(20, 24)]
        run(p, d, until=lambda: all(request.is_finished() for request in shared + alone))
        for request in shared:
            assert d.computed[request.request_id] == 3
        both_idle(p, d)


def test_a_pool_that_is_too_small_for_all_serves_all(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports, d={"blocks": 12}) as (p, d):
        tickets = [(prompt, seed, prefilled(p, prompt, seed)) for seed, prompt in enumerate((150, 150, 150, 100), 1)]
        requests = [d.add(prompt, ticket, seed=seed) for prompt, seed, ticket in tickets]
        run(p, d, until=lambda: all(request.is_finished() for request in requests))
        assert all(request.status == RequestStatus.FINISHED_LENGTH_CAPPED for request in requests)
        both_idle(p, d)


def test_windows_are_exact(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """A window that begins with a block: what the last token needs begins in the block before."""
    window = 2 * BLOCK
    with pair(tmp_path, key, ports, windows=(None, window)) as (p, d):
        for seed, prompt in enumerate((20, window - 1, window, 3 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK, 200), 1):
            ticket = prefilled(p, prompt, seed)
            request = d.add(prompt, ticket, seed=seed)
            d.step()
            tables = d.blocks_of(request)
            run(p, d, until=lambda request=request: not waits(d, request))
            assert d.right(request, tables, range(prompt - 1), 0)
            # The last token of the prompt needs as many as the window, itself included.
            assert d.right(request, tables, range(max(0, prompt - window), prompt - 1), 1), prompt
            run(p, d, until=request.is_finished)
            assert d.computed[request.request_id] == 1 + 2
            both_idle(p, d)


def test_a_request_without_a_transfer_is_served(tmp_path: Path, key: Path, ports: list[int]) -> None:
    with pair(tmp_path, key, ports) as (p, d):
        for engine in (p, d):
            request = engine.add(100, None)
            run(engine, until=request.is_finished)
            assert engine.tickets[request.request_id] is None
        both_idle(p, d)


def test_a_stopped_prompt_is_published_too(tmp_path: Path, key: Path, ports: list[int]) -> None:
    """A prompt whose first token ends it: a router sends it on without a look at that."""
    with pair(tmp_path, key, ports) as (p, d):
        request = p.add(40, dict(FOR_DECODE), tokens=5)
        request.sampling_params.stop_token_ids = [7]
        request.sampling_params._all_stop_token_ids = {7}
        run(p, until=request.is_finished)
        assert request.status == RequestStatus.FINISHED_STOPPED
        ticket = p.tickets[request.request_id]
        assert ticket is not None
        decoded = d.add(40, ticket)
        run(p, d, until=decoded.is_finished)
        both_idle(p, d)
