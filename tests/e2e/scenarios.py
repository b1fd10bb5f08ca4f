"""What two servers are put through. Each scenario takes a pair that runs."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import proxy
from checks import Pair, counted, moved_only, must, same
from client import divided, post, prompt_of, tokens_of, undivided

LENGTHS = (1, 5, 100, 300, 1000)


def lengths(pair: Pair) -> str:
    """Prompts shorter than a block and of many, chunked where the servers chunk them; nothing is in a prefix cache."""
    for seed, length in enumerate(LENGTHS):
        same(pair, prompt_of(length, 100 + seed), salt=uuid.uuid4().hex)
    return f"prompts of {LENGTHS} tokens"


def prefixes(pair: Pair) -> str:
    """What the decode server has is not moved again: a part of a prompt, all of its full blocks, prompts of full blocks only."""
    p_block, d_block = pair.blocks
    block = max(pair.blocks)
    for seed, (had, wanted) in enumerate(((300, 700), (700, 700), (2 * block, 2 * block), (2 * block, 4 * block))):
        salt, prompt = uuid.uuid4().hex, prompt_of(max(had, wanted), 200 + seed)
        same(pair, prompt[:had], salt=salt)
        # The last token is always computed, so its block is never a hit.
        cached = min(had // d_block, (wanted - 1) // d_block) * d_block
        same(pair, prompt[:wanted], cached=cached, salt=salt)
    return f"partial and full hits, blocks of {p_block} and {d_block}"


def concurrent(pair: Pair, count: int = 16) -> str:
    """Many at a time, of all lengths."""
    prompts = [prompt_of(20 + 61 * number, 300 + number) for number in range(count)]
    with counted(pair) as moved, ThreadPoolExecutor(count) as pool:
        shared = list(pool.map(lambda prompt: divided(pair.p.url, pair.d.url, prompt, 24, uuid.uuid4().hex), prompts))
    for prompt, one in zip(prompts, shared, strict=True):
        whole = undivided(pair.d.url, prompt, 24)
        must(one.tokens == whole, f"{len(prompt)} tokens, one of {count} at a time: {one.tokens} divided, {whole} undivided")
    moved_only(pair, moved, [(len(prompt), 0) for prompt in prompts])
    return f"{count} at a time"


def by_proxy(pair: Pair) -> str:
    """Through a proxy that knows nothing of kvx."""
    with proxy.serve(0, pair.p.url, pair.d.url) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prompt = prompt_of(400, 500)
        with counted(pair) as moved:
            tokens = tokens_of(post(f"http://127.0.0.1:{server.server_port}", {"prompt": prompt, "max_tokens": 24}))
        server.shutdown()
    must(tokens == undivided(pair.d.url, prompt, 24), f"through a proxy: {tokens}")
    moved_only(pair, moved, [(len(prompt), 0)])
    return "through a proxy"


def spoilt(pair: Pair) -> str:
    """One received block is zeroed: the tokens must change. Else nothing that was compared before means anything."""
    changed = 0
    for seed, length in enumerate((100, 300, 1000)):
        prompt = prompt_of(length, 400 + seed)
        shared = divided(pair.p.url, pair.d.url, prompt, 24, uuid.uuid4().hex)
        changed += shared.tokens != undivided(pair.d.url, prompt, 24)
    must(changed == 3, f"of 3 requests with a zeroed block {changed} have other tokens")
    return "a zeroed block changes the tokens, 3 of 3"
