"""Tests against vLLM itself. Where it is not installed they are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from pathlib import Path

import pytest

#: Files that want vLLM. The others in this folder do not.
WANT_VLLM = ("test_lifecycle.py", "test_ends.py", "test_deaths.py")

collect_ignore = list(WANT_VLLM) if importlib.util.find_spec("vllm") is None else []


def pytest_report_header() -> str | None:
    """Says why something is skipped."""
    if collect_ignore:
        return f"skipped in under_vllm, as vLLM is not installed: {', '.join(WANT_VLLM)}"
    return None


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key file."""
    path = tmp_path_factory.mktemp("key") / "key"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"kvx-key-1:{secrets.token_hex(32)}")
    return path


@pytest.fixture
def ports() -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(4)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    numbers = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return numbers
