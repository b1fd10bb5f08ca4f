"""What makes a run count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from client import Divided, divided, grown, metrics, undivided
from expect import Model
from servers import Server


class Failed(Exception):
    """Something did not hold."""


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server."""

    p: Server
    d: Server
    model: Model
    #: Tokens in a block of each.
    blocks: tuple[int, int]


def must(holds: bool, what: str) -> None:
    """Fails where something does not hold."""
    if not holds:
        raise Failed(what)


def settled(pair: Pair) -> None:
    """Waits until the prefill server has freed what it held, and nothing waits anywhere.

    Raises:
        Failed: it has not within its lease.
    """
    until = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while time.monotonic() < until:
        counts = metrics(pair.p.url)
        held = counts.get("vllm:kvx_granted_total", 0) - sum(
            counts.get(f"vllm:kvx_{name}_total", 0) for name in ("sent", "expired", "withdrawn")
        )
        if held == 0 and not any(metrics(server.url).get(name) for name in names for server in (pair.p, pair.d)):
            return
        time.sleep(0.1)
    raise Failed("the prefill server still holds blocks after a minute")


@contextmanager
def counted(pair: Pair) -> Iterator[dict[str, float]]:
    """What the decode server counts meanwhile, once it is over."""
    found: dict[str, float] = {}
    before = metrics(pair.d.url)
    yield found
    settled(pair)
    found.update(grown(before, metrics(pair.d.url)))


def same(pair: Pair, prompt: list[int], count: int = 24, *, cached: int = 0, salt: str | None = None) -> Divided:
    """A request that both servers share has the tokens of one that is not divided, moved what the plan says, and left the decode server
    nothing to compute but the last prompt token."""
    with counted(pair) as moved:
        shared = divided(pair.p.url, pair.d.url, prompt, count, salt)
    whole = undivided(pair.d.url, prompt, count)
    must(shared.tokens == whole, f"{len(prompt)} tokens: {shared.tokens} divided, {whole} undivided")
    if pair.model.transferred(len(prompt)) == len(prompt):
        # The prefill server has read all of it.
        must(shared.first == whole[:1], f"{len(prompt)} tokens: the first is {shared.first}, and {whole[:1]} undivided")
    moved_only(pair, moved, [(len(prompt), cached)])
    return shared


def moved_only(pair: Pair, moved: dict[str, float], requests: list[tuple[int, int]]) -> None:
    """The decode server moved what the plan says for requests of so many tokens, of which it had so many, and computed no more than the last
    token of each."""
    wanted = sum(pair.model.bytes(length, cached, pair.blocks) for length, cached in requests)
    found = int(moved.get("vllm:kvx_bytes_total", 0))
    must(found == wanted, f"{requests}: {found} bytes were moved, {wanted} are to be")
    computed = int(moved.get("vllm:prompt_tokens_by_source_total/local_compute", 0))
    must(computed <= len(requests), f"{requests}: the decode server computed {computed} prompt tokens")
