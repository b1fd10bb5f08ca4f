"""What is wrong is refused, by name, with what to do about it; nothing panics."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Build
from oracle import Shape

import kvx

SHAPE = Shape("packed-nhd", block=32)


def test_arguments_of_the_wrong_type_or_value(build: Build, key: kvx.Key) -> None:
    engine, cache = build(SHAPE)
    ticket = engine.publish("ticket", 40, [[0, 1]]).ticket
    rank = kvx.Rank(cache.layouts[0], [], [])
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: engine.publish("k", -1, [[0]]), ValueError, "-1 is not from 0"),
        (lambda: engine.publish("k", 1 << 70, [[0]]), ValueError, "not from 0"),
        (lambda: engine.publish("k", "1", [[0]]), TypeError, "integer"),  # type: ignore[arg-type]
        (lambda: engine.publish(1, 1, [[0]]), TypeError, "'int' object"),  # type: ignore[arg-type]
        (lambda: engine.publish("k" * 300, 1, [[0]]), kvx.MisuseError, "256"),
        (lambda: engine.publish("k", 1, [0]), TypeError, "a list for each cache group"),  # type: ignore[list-item]
        (lambda: engine.publish("k", 1, 0), TypeError, "a list for each cache group"),  # type: ignore[arg-type]
        (lambda: engine.publish("k", 1, ["0"]), TypeError, "a list for each cache group"),  # type: ignore[list-item]
        (lambda: engine.publish("k", 1, [[1.5]]), TypeError, "blocks of cache group 0"),  # type: ignore[list-item]
        (lambda: engine.publish("k", 1, [[-3]]), ValueError, "blocks of cache group 0: -3"),
        (lambda: engine.publish("k", 40, [[0]]), kvx.MisuseError, "ends before the tokens do"),
        (lambda: engine.publish("k", 1, [[0], [0]]), kvx.MisuseError, "one block table per cache group"),
        (lambda: engine.fetch(ticket, [[0, 1]], range(0, 41)), kvx.MisuseError, "not inside"),
        (lambda: engine.fetch(ticket, [[0, 1]], range(0, 10, 2)), ValueError, "side by side"),
        (lambda: engine.fetch(ticket.to_bytes(), [[0, 1]]), TypeError, "kvx.Ticket, not bytes"),  # type: ignore[arg-type]
        (lambda: engine.store(ticket, [[0, 1]]), kvx.MisuseError, "leased to be read"),
        (lambda: kvx.Model.llama_like(0, 1, 8), kvx.ConfigError, "layers"),
        (lambda: kvx.Model.llama_like(1, 1, 8, "complex"), kvx.ConfigError, "complex"),
        (lambda: kvx.Model.preset("gpt-9"), kvx.ConfigError, "llama-3.1-8b"),
        (lambda: cache.model.layouts("nhwc", blocks=4, block_tokens=16), kvx.ConfigError, "packed-nhd"),
        (lambda: cache.model.layouts("packed-nhd", blocks=0, block_tokens=16), kvx.ConfigError, "0"),
        (lambda: cache.model.layouts("packed-nhd", blocks=-4, block_tokens=16), ValueError, "-4"),
        (lambda: cache.model.layouts("packed-nhd", blocks=4, block_tokens=16, tp=0), kvx.ConfigError, "tp"),
        (lambda: cache.model.layouts("packed-nhd", blocks=4, block_tokens=16, regions="all"), ValueError, "single"),
        (lambda: cache.model.layouts("packed-nhd", blocks=4, block_tokens=16, conv_order="any"), ValueError, "taps-outside"),
        (lambda: kvx.Layout.from_dict({"coords": 1}), kvx.ConfigError, "coords|invalid"),
        (lambda: kvx.Layout.from_dict({"coords": object()}), TypeError, "JSON"),
        (lambda: kvx.Engine("", cache.model, [rank], key=key), kvx.KvxError, "name"),
        (lambda: kvx.Engine("e", cache.model, [], key=key), kvx.ConfigError, "without ranks"),
        (lambda: kvx.Engine("e", cache.model, [rank]), ValueError, "needs a key"),
        (lambda: kvx.Engine("e", cache.model, [rank], key=key, plaintext="loopback"), ValueError, "drop one"),
        (lambda: kvx.Engine("e", cache.model, [rank], plaintext="yes"), ValueError, "anywhere"),  # type: ignore[arg-type]
        (lambda: kvx.Engine("e", cache.model, [rank], key=key, listen="nowhere"), kvx.ConfigError, "10.0.0.1:5600"),
        (lambda: kvx.Engine("e", cache.model, [rank], key=key, ttl=-1), ValueError, "ttl"),
        (lambda: kvx.Engine("e", cache.model, [rank], key=key, facts={"": 1}), kvx.ConfigError, "without a name"),
        (lambda: kvx.Key.from_bytes(b"short"), ValueError, "32 bytes"),
        (lambda: kvx.Key.from_text("secret"), kvx.ConfigError, "kvx-key-1"),
        (lambda: kvx.open_backend("verbs"), kvx.ConfigError, "mock, shm, ucx"),
        (lambda: kvx.open_backend("shm", {"nonsense": 1}), kvx.ConfigError, "nonsense"),
        (lambda: kvx.open_backend(None, {"nonsense": 1}), ValueError, "name"),
        (lambda: kvx.Region.at_address(0, 8, None), ValueError, "address 0"),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()


def test_a_backend_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import kvx
try:
    kvx.open_backend("ucx", {"lib": "/nowhere/libucp.so.0"})
except kvx.UnsupportedError as error:
    assert error.backend == "ucx" and "libucx" in error.remedy
    print(error.retry)
"""
    # A process can open one library of UCX's: this one may have done so.
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "never", ended.stderr
    monkeypatch.setenv("KVX_BACKEND", "mock")
    assert kvx.open_backend().name == "mock"
    monkeypatch.setenv("KVX_BACKEND", "nothing")
    with pytest.raises(kvx.ConfigError, match="nothing"):
        kvx.open_backend()


def test_tickets_come_back_as_they_were(build: Build) -> None:
    engine, _ = build(SHAPE)
    ticket = engine.publish("request-7", 100, [[3, 1, 2, 9, 8]]).ticket
    for again in (
        kvx.Ticket.from_bytes(ticket.to_bytes()),
        kvx.Ticket.from_params(json.loads(json.dumps(ticket.to_params("7")))),
        pickle.loads(pickle.dumps(ticket)),
    ):
        assert again == ticket
        assert (again.key, again.engine, again.tokens, again.access, again.whole) == ("request-7", engine.name, 100, "read", True)
        # The fifth block holds nothing of the request.
        assert again.groups == [(32, 0, [3, 1, 2, 9])] and again.states == [False]
        assert again.address == engine.address and again.ttl == 30.0
    assert engine.publish("request-8", 100, [[3, 1, 2, 9]]).ticket != ticket
    params = ticket.to_params("7")
    assert params["do_remote_prefill"] is True and params["remote_block_ids"] == [[3, 1, 2, 9]]


def test_tickets_that_are_none() -> None:
    for data in (b"", b"kvxT", b"\0" * 100, b"kvxT\1\0\1\0" + b"\xff" * 50):
        with pytest.raises(kvx.PeerError):
            kvx.Ticket.from_bytes(data)
    with pytest.raises(kvx.UnsupportedError, match="schema"):
        kvx.Ticket.from_bytes(b"kvxT\x63\0\x63\0" + b"\x80")
    for params in ({}, {"do_remote_prefill": True}, {"kvx": 1}, {"kvx": {"schema": [1, 1]}}):
        with pytest.raises(kvx.PeerError, match="kvx"):
            kvx.Ticket.from_params(params)
    with pytest.raises(TypeError):
        kvx.Ticket.from_params([])  # type: ignore[arg-type]


def test_a_model_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (config, tmp_path, str(tmp_path / "config.json")):
        model = kvx.Model.from_config(given)
        assert (model.num_layers, model.bytes_per_token, len(model.layers)) == (2, 2 * 2 * 4 * 8 * 2, 2)
        assert model.facts["kv_heads"] == "4"
    with pytest.raises(kvx.ConfigError, match="model_type"):
        kvx.Model.from_config({"model_type": "unheard-of"})
    with pytest.raises(FileNotFoundError, match="missing.json"):
        kvx.Model.from_config(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="path"):
        kvx.Model.from_config(7)  # type: ignore[arg-type]


def test_a_layout_is_taken_apart_and_checked_anew() -> None:
    (layout,) = kvx.Model.preset("llama-3.1-8b").layouts("packed-hnd", blocks=8, block_tokens=16)
    parts = layout.to_dict()
    assert kvx.Layout.from_dict(parts) == layout
    assert layout.groups[0]["block_tokens"] == 16 and len(layout.tensors) == 64
    assert layout.coords["grid"] == {"tp": 1, "pp": 1, "dp": 1}
    parts["tensors"][0]["region"] = 5000
    with pytest.raises(kvx.ConfigError):
        kvx.Layout.from_dict(parts)


def test_keys(tmp_path: Path, key: kvx.Key) -> None:
    path = tmp_path / "kvx.key"
    key.write_new(path)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert text.split(":")[1].strip() not in repr(key) + str(key)
    kvx.Key.from_text(text)
    kvx.Key.from_file(path)
    with pytest.raises(kvx.ConfigError, match="never overwritten"):
        key.write_new(path)
    path.chmod(0o644)
    with pytest.raises(kvx.ConfigError, match="chmod 600"):
        kvx.Key.from_file(path)


def test_what_kvx_says_comes_out_of_logging(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    kvx.forward_logs(logging.DEBUG)
    with caplog.at_level(logging.DEBUG, "kvx_connector"):
        (prefill, _), (decode, _) = build(SHAPE), build(SHAPE)
        lease = prefill.publish("told", 40, [[0, 1]])
        decode.fetch(lease.ticket, [[0, 1]]).wait(30)
        lease.wait(30)
        until = time.monotonic() + 10
        while time.monotonic() < until and not any("freed" in record.getMessage() for record in caplog.records):
            time.sleep(0.01)
        told = [record for record in caplog.records if record.name.startswith("kvx_connector")]
    assert any(record.levelno == logging.INFO and "chose a backend" in record.getMessage() for record in told)
    assert any("told" in record.getMessage() for record in told)
    assert {record.threadName for record in told} & {"kvx-rank"}
    kvx.forward_logs(logging.WARNING)
    with pytest.raises(ValueError, match="40"):
        kvx.forward_logs(logging.CRITICAL)


def test_metrics_are_those_of_prometheus(build: Build) -> None:
    kvx.record_metrics()
    kvx.record_metrics()
    (prefill, _), (decode, _) = build(SHAPE), build(SHAPE)
    lease = prefill.publish("counted", 40, [[0, 1]])
    decode.fetch(lease.ticket, [[0, 1]]).wait(30)
    lease.wait(30)
    text = kvx.metrics()
    assert "# TYPE kvx_requests_asked_total counter" in text
    mine = [line for line in text.splitlines() if line.startswith("kvx_requests_asked_total") and decode.name in line]
    assert [line.split("mode=")[1] for line in sorted(mine)] == ['"read"} 1', '"write"} 0']


def test_status_is_what_there_is_now(build: Build) -> None:
    engine, _ = build(SHAPE)
    lease = engine.publish("status", 40, [[0, 1]])
    until = time.monotonic() + 10
    while engine.open_leases == 0 and time.monotonic() < until:
        # Its thread, where that is at work, carries the order out next.
        time.sleep(0.001)
    status = engine.status()
    assert (status["engine"], status["address"]) == (engine.name, engine.address)
    assert status["ranks"][0]["leases"]["held"] == 1 == engine.open_leases
    json.dumps(status)
    lease.withdraw()
    lease.wait(5)
    assert engine.open_leases == 0
