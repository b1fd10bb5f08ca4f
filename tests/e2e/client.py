"""Sends requests through a prefill and a decode server, and looks at what they count."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

#: What a router asks of a prefill server: vLLM's own names, and nothing of kvx.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

VOCABULARY = 1024


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


class Refused(Exception):
    """A server answered with an error."""

    def __init__(self, code: int, body: str) -> None:
        super().__init__(f"HTTP {code}: {body[:300]}")
        self.code, self.body = code, body


def post(url: str, body: dict[str, Any], timeout: float = 300.0) -> dict[str, Any]:
    """Asks a server for a completion."""
    data = json.dumps({"model": "m", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body})
    request = urllib.request.Request(f"{url}/v1/completions", data.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode(errors="replace")) from None


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """The tokens that a server generated."""
    return list(answer["choices"][0]["token_ids"])


@dataclass
class Divided:
    """What came of a request that two servers shared."""

    tokens: list[int]
    first: list[int]
    params: dict[str, Any] | None
    prefill_s: float
    decode_s: float


def prefill(url: str, prompt: list[int], salt: str | None = None) -> dict[str, Any]:
    """Has a prompt read."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": dict(PREFILL)}
    return post(url, body | ({"cache_salt": salt} if salt else {}))


def divided(p: str, d: str, prompt: list[int], count: int, salt: str | None = None) -> Divided:
    """Has one server read a prompt, and another generate."""
    begun = time.perf_counter()
    first = prefill(p, prompt, salt)
    read = time.perf_counter()
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "kv_transfer_params": first["kv_transfer_params"]}
    second = post(d, body | ({"cache_salt": salt} if salt else {}))
    done = time.perf_counter()
    return Divided(tokens_of(second), tokens_of(first), first["kv_transfer_params"], read - begun, done - read)


def undivided(url: str, prompt: list[int], count: int) -> list[int]:
    """Has one server do all, with nothing of its prefix cache."""
    return tokens_of(post(url, {"prompt": prompt, "max_tokens": count, "cache_salt": uuid.uuid4().hex}))


def metrics(url: str) -> dict[str, float]:
    """All metrics of a server: by name, and by name and source where there is one; summed over the rest of their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or " " not in line:
            continue
        name, value = line.rsplit(" ", 1)
        plain, _, labels = name.partition("{")
        if 'source="' in labels:
            source = labels.split('source="')[1].split('"')[0]
            plain = f"{plain}/{source}"
        found[plain] = found.get(plain, 0.0) + float(value)
    return found


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has grown."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
