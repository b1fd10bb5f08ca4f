"""Every element arrives where the consumer's layout has it, and no other byte changes: by an oracle of NumPy's."""

from __future__ import annotations

import pytest
from engines import Build
from oracle import NAMES, Cache, Shape

import kvx


def move(pair: tuple[tuple[kvx.Engine, Cache], tuple[kvx.Engine, Cache]], tokens: int, key: str) -> list[kvx.FetchReport]:
    """Moves a request and checks everything."""
    (prefill, theirs), (decode, ours) = pair
    # Between blocks of the same size, the last one is moved with the unused rest of it.
    block = theirs.shape.block
    whole = -(-tokens // block) * block if block == ours.shape.block else tokens
    request = theirs.request(whole)
    blocks, room = theirs.ids(tokens), ours.ids(tokens)
    theirs.put(request, blocks)
    expected, before = ours.copy(), theirs.copy()
    ours.put(request, room, expected)
    assert not ours.is_as(expected), "there is nothing to be moved"
    lease = prefill.publish(key, tokens, [blocks])
    reports = decode.fetch(lease.ticket, [room]).wait(30)
    assert ours.is_as(expected)
    assert theirs.is_as(before)
    assert lease.wait(30) == ["done"]
    return reports


PAIRS = [
    (Shape("flash-attention-hnd", tp=2, block=16), Shape("flash-attention-nhd", tp=1, block=32)),
    (Shape("packed-nhd", tp=1, block=32), Shape("cpu-transposed", tp=4, block=8)),
    (Shape("cross-layer-hnd", tp=1, pp=2, block=16), Shape("flash-infer-nhd", tp=2, block=20)),
    (Shape("flash-infer-hnd", tp=8, block=16), Shape("packed-hnd", tp=3, pp=3, block=16)),
    (Shape("cpu-transposed", tp=2, block=24), Shape("cross-layer-nhd", tp=1, block=16)),
]


@pytest.mark.parametrize("shapes", PAIRS, ids=lambda shapes: f"{shapes[0].named} to {shapes[1].named}")
def test_between_shapes(build: Build, backend: str, shapes: tuple[Shape, Shape]) -> None:
    pair = build(shapes[0], backend), build(shapes[1], backend)
    for tokens in (1, 16, 100, 33):
        reports = move(pair, tokens, f"request-{tokens}")
        assert sum(report.bytes for report in reports) >= tokens * 3 * 4 * 16 * 2 * 2
        assert {way.split("/")[0] for report in reports for way in report.transports} == {backend}


@pytest.mark.parametrize("named", NAMES)
def test_every_name(build: Build, named: str) -> None:
    pair = build(Shape(named, tp=2, block=16)), build(Shape("flash-attention-nhd", tp=1, block=16))
    move(pair, 50, "there")
    move((pair[1], pair[0]), 50, "back")


def test_memory_that_kvx_allocates(build: Build, backend: str) -> None:
    pair = build(PAIRS[0][0], backend, allocate=True), build(PAIRS[0][1], backend, allocate=True)
    move(pair, 70, "allocated")


def test_digests_are_compared(build: Build) -> None:
    pair = build(PAIRS[0][0], digests=True), build(PAIRS[0][1], digests=True)
    move(pair, 40, "compared")
    assert pair[1][0].status()["ranks"][0]["counters"].get("kvx_digests_compared_total", 1)


def test_a_range_of_tokens(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PAIRS[0][0]), build(PAIRS[0][1])
    request = theirs.request(96)
    blocks, room = theirs.ids(96), ours.ids(96)
    theirs.put(request, blocks)
    expected = ours.copy()
    # Tokens 32 .. 64 are the consumer's second block: the rest is as it was.
    wanted = {of: elements[32:64] for of, elements in request.items()}
    ours.put(wanted, [room[1]], expected)
    lease = prefill.publish("range", 96, [blocks])
    decode.fetch(lease.ticket, [room], range(32, 64)).wait(30)
    assert ours.is_as(expected)


def test_blocks_that_are_written(build: Build, backend: str) -> None:
    (prefill, theirs), (decode, ours) = build(PAIRS[0][0], backend), build(PAIRS[0][1], backend)
    request = theirs.request(90)
    blocks, room = theirs.ids(90), ours.ids(90)
    theirs.put(request, blocks)
    expected = ours.copy()
    ours.put(request, room, expected)
    lease = decode.invite("written", 90, [room])
    assert lease.ticket.access == "write"
    prefill.store(lease.ticket, [blocks]).wait(30)
    assert lease.wait(30) == ["done"]
    assert ours.is_as(expected)


def test_blocks_that_begin_later(build: Build) -> None:
    (prefill, theirs), (decode, ours) = build(PAIRS[0][1]), build(PAIRS[0][1])
    request = theirs.request(96)
    blocks, room = theirs.ids(96), ours.ids(96)
    theirs.put(request, blocks)
    expected = ours.copy()
    ours.put({of: elements[32:] for of, elements in request.items()}, room[1:], expected)
    lease = prefill.publish("later", 96, [blocks])
    # The first block is here already: its place in the table is not given.
    decode.fetch(lease.ticket, [kvx.Table(room[1:], first=1)], range(32, 96)).wait(30)
    assert ours.is_as(expected)
