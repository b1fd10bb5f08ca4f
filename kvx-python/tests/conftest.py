"""Engines for tests, which are closed after each."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engines import MODEL, Build, numbers, opened
from oracle import Cache, Shape

import kvx

@pytest.fixture(params=["shm", "mock", "ucx"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that there is."""
    name: str = request.param
    opened(name)
    return name


@pytest.fixture(scope="session")
def key() -> kvx.Key:
    """The deployment's."""
    return kvx.Key.generate()


@pytest.fixture
def build(key: kvx.Key) -> Iterator[Build]:
    """Makes engines, and closes them."""
    with ExitStack() as closing:

        def make(
            shape: Shape,
            backend: str = "shm",
            *,
            model: tuple[int, int, int] = MODEL,
            allocate: bool = False,
            **settings: object,
        ) -> tuple[kvx.Engine, Cache]:
            number = next(numbers)
            cache = Cache(shape, model, seed=number)
            backends = [opened(backend) for _ in cache.layouts]
            regions = None
            if allocate:
                regions = [
                    [each.allocate(nbytes) for nbytes in layout.region_bytes]
                    for layout, each in zip(cache.layouts, backends, strict=True)
                ]
            ranks = [
                kvx.Rank(layout, lent, [each])
                for layout, lent, each in zip(cache.layouts, cache.lend(regions), backends, strict=True)
            ]
            engine = kvx.Engine(f"engine-{number}", cache.model, ranks, key=key, **settings)  # type: ignore[arg-type]
            closing.callback(engine.close)
            return engine, cache

        yield make


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines have an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def root() -> Path:
    """The package's folder in the repository."""
    return Path(__file__).resolve().parent.parent
