"""Servers that do not fit together: what differs is named, and both go on."""

from __future__ import annotations

from checks import Pair, must
from client import Refused, post, prefill, prompt_of, tokens_of, undivided


def refused(pair: Pair, words: tuple[str, ...], spoil: dict[str, object] | None = None) -> str:
    """A request through both fails, the decode server's log names what differs, and each serves on alone."""
    prompt = prompt_of(200, 1)
    ticket = prefill(pair.p.url, prompt)["kv_transfer_params"]
    ticket["kvx"] |= spoil or {}
    try:
        answer = post(pair.d.url, {"prompt": prompt, "max_tokens": 8, "kv_transfer_params": ticket})
        must(False, f"it was answered: {tokens_of(answer)}")
    except Refused as error:
        must(error.code == 500, f"the error is {error}")
    must(any(all(word in line for word in words) for line in _log(pair)), f"no line of {pair.d.log} has {words}")
    for server in (pair.p, pair.d):
        must(len(undivided(server.url, prompt, 8)) == 8, f"{server.kind.name} does not serve any more")
    return f"refused, naming {', '.join(words)}"


def _log(pair: Pair) -> list[str]:
    return pair.d.log.read_text(errors="replace").splitlines()
