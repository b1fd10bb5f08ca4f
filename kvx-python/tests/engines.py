"""What tests of engines share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

import pytest
from oracle import Cache

import kvx

MODEL = (3, 4, 16)
#: Numbers of engines: their names, and the seeds of what is in their memory.
numbers = itertools.count()

#: Options for each backend. UCX would take shared memory or whatever it finds best: here it goes over TCP, which there is everywhere.
OPTIONS: dict[str, Mapping[str, object]] = {"mock": {}, "shm": {}, "ucx": {"tls": "tcp"}}


def opened(backend: str) -> kvx.Backend:
    """The backend, or a skip that says why there is none."""
    found = kvx.backends().named(backend)
    if not found.available:
        if backend in os.environ.get("KVX_REQUIRE", "").split(","):
            pytest.fail(str(found))
        pytest.skip(str(found))
    return kvx.open_backend(backend, OPTIONS[backend])


#: Makes an engine of a shape, and its memory.
Build = Callable[..., tuple[kvx.Engine, Cache]]
