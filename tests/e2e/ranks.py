"""Ranks of two numbers in 16 bits: the bytes that arrive are compared, because tokens cannot be. Two ranks round their sums otherwise than one."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from checks import Pair, counted, moved_only, must
from client import divided, prompt_of, undivided
from scenarios import LENGTHS

#: A digest by (request, layer, head).
Seen = dict[tuple[str, str, int], str]


def bytes_are_the_same(pair: Pair, written: Path, rounds: int) -> str:
    """What the decode server's ranks have received is what the prefill server's had, head by head; and how often a token differs, also
    between the two servers where nothing is moved."""
    requests = moved = whole = 0
    for turn in range(rounds):
        for seed, length in enumerate(LENGTHS):
            prompt = prompt_of(length, 100 * turn + seed)
            with counted(pair) as counts:
                shared = divided(pair.p.url, pair.d.url, prompt, 24, uuid.uuid4().hex)
            moved_only(pair, counts, [(length, 0)])
            there, here = undivided(pair.p.url, prompt, 24), undivided(pair.d.url, prompt, 24)
            requests += 1
            moved += shared.tokens != here
            whole += there != here
    sent, received = (read(written, role) for role in ("kv_producer", "kv_consumer"))
    must(len({name for name, _, _ in received}) == requests, f"of {requests} requests {len(received)} digests were written")
    must(sent.keys() == received.keys(), "other layers and heads have arrived than were sent")
    differ = [key for key, digest in sent.items() if received[key] != digest]
    must(not differ, f"{len(differ)} of {len(sent)} digests differ, the first of {differ[:1]}")
    return (
        f"all {len(sent)} digests of {requests} requests are equal; tokens differ from an undivided run in {moved}, "
        f"and between undivided runs of the two servers in {whole}"
    )


def read(folder: Path, role: str) -> Seen:
    """What the ranks of a server have written."""
    found: Seen = {}
    for path in sorted(folder.glob(f"{role}-*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found[line["request"], line["layer"], line["head"]] = line["digest"]
    return found
