"""``kv_transfer_params``: what routers and proxies carry from the producer to the consumer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_json(params: Mapping[str, Any] | None) -> str | None:
    """The parameters as kvx reads them, or nothing where a request has none."""
    return None if not params else json.dumps(params, default=str)


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether the cache comes from another engine."""
    return bool(params and params.get("do_remote_prefill"))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether the cache is for another engine."""
    return bool(params and params.get("do_remote_decode"))


#: vLLM's names of how a request ends, as kvx says it. A request that stopped by itself has its cache all the same, and a router sends it on
#: without a look at the first token: it is published like one that has reached its length.
_ENDS = {
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_STOPPED": "length",
    "FINISHED_ABORTED": "aborted",
}


def end_of(status: Any) -> str:
    """How a request ended, by the name of its ``RequestStatus``."""
    return _ENDS.get(status.name, "failed")
