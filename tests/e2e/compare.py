"""kvx beside NixlConnector: two pairs of servers at once, which take turns with the same requests."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from checks import Pair
from client import divided, post, prompt_of


def first_tokens(kvx: Pair, nixl: Pair, rounds: int = 31) -> Iterator[str]:
    """From a ticket to the decode server until its first token is there."""
    for length in (100, 1000):
        times: dict[str, list[float]] = {"kvx": [], "nixl": []}
        for turn in range(rounds + 2):
            pairs = [("kvx", kvx), ("nixl", nixl)]
            for name, pair in pairs if turn % 2 else pairs[::-1]:
                took = divided(pair.p.url, pair.d.url, prompt_of(length, turn), 1, uuid.uuid4().hex).decode_s
                # The first two make acquaintance.
                if turn >= 2:
                    times[name].append(took)
        yield f"first token after {length} tokens: {_ratio(times['kvx'], times['nixl'])}"


def steps(kvx: Pair, nixl: Pair, rounds: int = 31, tokens: int = 20, most_s: float = 300) -> Iterator[str]:
    """How many tokens a second a request gets that the decode server has alone while others are moved: in so many turns, or as many as the time
    allows. Four servers share the machine, so a turn can take long."""
    times: dict[str, list[float]] = {"kvx": [], "nixl": []}
    ends = time.monotonic() + most_s
    for turn in range(rounds):
        if time.monotonic() > ends and turn >= 5:
            break
        pairs = [("kvx", kvx), ("nixl", nixl)]
        for name, pair in pairs if turn % 2 else pairs[::-1]:
            with ThreadPoolExecutor(1) as pool:
                alone = pool.submit(_alone, pair, turn, tokens)
                moved = 0
                while moved < 3 or not alone.done():
                    divided(pair.p.url, pair.d.url, prompt_of(600, 100 * turn + moved), 1, uuid.uuid4().hex)
                    moved += 1
                times[name].append(alone.result())
    rates = {name: tokens / statistics.median(of) for name, of in times.items()}
    yield (
        f"{tokens} tokens while requests of 600 are moved: {_ratio(times['kvx'], times['nixl'])}; "
        f"{rates['kvx']:.1f} and {rates['nixl']:.1f} steps a second"
    )


def _alone(pair: Pair, seed: int, tokens: int) -> float:
    begun = time.perf_counter()
    post(pair.d.url, {"prompt": prompt_of(20, seed), "max_tokens": tokens, "cache_salt": uuid.uuid4().hex})
    return time.perf_counter() - begun


def _ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of paired ratios, with an interval that holds it in 19 of 20 cases."""
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    middle, spread = len(ratios) / 2, 0.98 * len(ratios) ** 0.5
    low, high = ratios[max(0, int(middle - spread))], ratios[min(len(ratios) - 1, int(middle + spread))]
    return (
        f"kvx {statistics.median(ours) * 1e3:.1f} ms, NIXL {statistics.median(theirs) * 1e3:.1f} ms, ratio "
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}), {len(ratios)} rounds"
    )
