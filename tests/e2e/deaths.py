"""Servers that are killed in the middle of it, and started again."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from checks import Pair, must, same, settled
from client import Refused, divided, metrics, post, prefill, prompt_of, tokens_of, undivided
from servers import Server


def producers(pair: Pair, cycles: int, recompute: bool) -> Iterator[str]:
    """The prefill server is killed: the decode server answers every request, and the next transfer works, without a restart of its own."""
    before: dict[str, int] = {}
    for cycle in range(cycles):
        prompts = [prompt_of(600 + number, 1000 * cycle + number) for number in range(4)]
        tickets = [prefill(pair.p.url, prompt)["kv_transfer_params"] for prompt in prompts]
        with ThreadPoolExecutor(9) as pool:
            # Some are on their way while it dies, for others it is dead when they come.
            moving = [pool.submit(_any, pair, prompt_of(900, 5000 + 10 * cycle + number)) for number in range(4)]
            time.sleep(0.05 * (cycle % 4))
            halted = cycle % 2 == 1
            if halted:
                # What is asked of it now has begun and cannot end before it is dead.
                pair.p.signal(signal.SIGSTOP)
            else:
                pair.p.kill()
            answers = [pool.submit(_decode, pair, prompt, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
            if halted:
                time.sleep(0.5)
                pair.p.kill()
            found = [answer.result() for answer in answers]
            [one.result() for one in moving]
        for prompt, tokens in zip(prompts, found, strict=True):
            if recompute:
                must(tokens == undivided(pair.d.url, prompt, 8), f"{len(prompt)} tokens, computed after a death: {tokens}")
            else:
                must(tokens is None, f"{len(prompt)} tokens: an answer where an error was asked for: {tokens}")
        pair.p.start()
        pair.p.wait()
        same(pair, prompt_of(500, 7000 + cycle))
        before = before or pair.d.holdings()
        yield f"the prefill server was killed{' while it was halted' if halted else ''} and started again, {cycle + 1} of {cycles}"
    yield _nothing_is_left(pair.d, before)


def consumers(pair: Pair, cycles: int, lease_s: float) -> Iterator[str]:
    """The decode server is killed: what the prefill server held for it comes back within the lease."""
    before: dict[str, int] = {}
    for cycle in range(cycles):
        prompts = [prompt_of(900, 20_000 + 10 * cycle + number) for number in range(4)]
        tickets = [prefill(pair.p.url, prompt)["kv_transfer_params"] for prompt in prompts]
        senders = [
            threading.Thread(target=_decode, args=(pair, prompt, ticket)) for prompt, ticket in zip(prompts, tickets, strict=True)
        ]
        halted = cycle % 2 == 1
        if halted:
            pair.d.signal(signal.SIGSTOP)
        for sender in senders:
            sender.start()
        time.sleep(0.2 if halted else 0.01 * cycle)
        pair.d.kill()
        begun = time.monotonic()
        while _held(pair) and time.monotonic() < begun + lease_s + 5:
            time.sleep(0.2)
        must(_held(pair) == 0, f"{_held(pair)} leases are held {lease_s + 5} s after the decode server was killed")
        took = time.monotonic() - begun
        for sender in senders:
            sender.join()
        pair.d.start()
        pair.d.wait()
        same(pair, prompt_of(500, 30_000 + cycle))
        settled(pair)
        before = before or pair.p.holdings()
        how = " while it was halted" if halted else ""
        yield f"the decode server was killed{how}, blocks came back after {took:.1f} s of {lease_s} s, {cycle + 1} of {cycles}"
    yield _nothing_is_left(pair.p, before)


def _nothing_is_left(survivor: Server, before: dict[str, int]) -> str:
    """It has no more of the system than after the first death."""
    until = time.monotonic() + 30
    while any(count > before[name] for name, count in survivor.holdings().items()) and time.monotonic() < until:
        time.sleep(0.5)
    now = survivor.holdings()
    must(all(count <= before[name] for name, count in now.items()), f"{survivor.kind.name} had {before}, and has {now}")
    return f"{survivor.kind.name} has no more than after the first death: {now}"


def _held(pair: Pair) -> int:
    counts = metrics(pair.p.url)
    ended = sum(counts.get(f"vllm:kvx_{name}_total", 0) for name in ("sent", "expired", "withdrawn"))
    return int(counts.get("vllm:kvx_granted_total", 0) - ended)


def _decode(pair: Pair, prompt: list[int], ticket: dict[str, object]) -> list[int] | None:
    """The tokens, or nothing where the server answers with an error or dies."""
    try:
        return tokens_of(post(pair.d.url, {"prompt": prompt, "max_tokens": 8, "kv_transfer_params": ticket}))
    except (Refused, urllib.error.URLError, OSError):
        return None


def _any(pair: Pair, prompt: list[int]) -> None:
    """A request of which either server may die."""
    try:
        divided(pair.p.url, pair.d.url, prompt, 8)
    except (Refused, urllib.error.URLError, OSError):
        pass
