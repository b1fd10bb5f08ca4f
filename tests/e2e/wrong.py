"""Servers that do not fit together: what differs is named, and both go on."""

from __future__ import annotations

from checks import Pair, must, settled
from client import Refused, post, prefill, prompt_of, tokens_of, undivided


def refused(pair: Pair, text: str, spoil: dict[str, object] | None = None) -> str:
    """A request through both fails, an error in the decode server's log says what differs, what was held for it comes back, and each serves on
    alone."""
    prompt = prompt_of(200, 1)
    before = pair.d.log.stat().st_size
    ticket = prefill(pair.p.url, prompt)["kv_transfer_params"]
    ticket["kvx"] |= spoil or {}
    try:
        answer = post(pair.d.url, {"prompt": prompt, "max_tokens": 8, "kv_transfer_params": ticket})
        must(False, f"it was answered: {tokens_of(answer)}")
    except Refused as error:
        must(error.code == 500, f"the error is {error}")
    said = pair.d.log.read_bytes()[before:].decode(errors="replace").splitlines()
    must(any("ERROR" in line and text in line for line in said), f"no error in {pair.d.log} has {text!r}")
    settled(pair)
    for server in (pair.p, pair.d):
        must(len(undivided(server.url, prompt, 8)) == 8, f"{server.kind.name} does not serve any more")
    return f"refused: {text}"
