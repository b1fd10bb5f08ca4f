"""What is there, what is missing, and how to get it."""

import pickle

import pytest

import kvx


def test_one_wheel_carries_every_backend() -> None:
    assert kvx.backends().names() == ["mock", "shm", "ucx"]
    assert kvx.backends().named("mock").available


def test_what_is_missing_says_why_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_UCX_LIB", "/nowhere")
    ucx = kvx.backends().named("ucx")
    assert not ucx.available
    assert ucx.remedy
    printed = str(kvx.backends()).splitlines()
    assert [line.split(":")[0] for line in printed] == ["mock", "shm", "ucx"]
    assert ucx.detail in printed[2] and ucx.remedy in printed[2]


def test_errors_are_pickled_whole() -> None:
    error = kvx.PeerError("fetch: gone", retry="reconnect", operation="fetch", code=-3, context={"rank": "1"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kvx.PeerError and isinstance(again, kvx.KvxError)
    assert (str(again), again.kind, again.retry, again.code) == ("fetch: gone", "peer", "reconnect", -3)
    assert again.context == {"rank": "1"} and again.operation == "fetch"
