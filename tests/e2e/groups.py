"""Groups of scenarios: which servers each wants."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import compare
import deaths
import ranks
import scenarios
import wrong
from checks import Pair
from expect import Model
from servers import Kind, Server, Setting, wait_for

HERE = Path(__file__).resolve().parent
#: What servers compute in. With AMX's tiles, which vLLM takes for bfloat16, blocks look otherwise than kvx knows.
HALF = "float16" if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace") else "bfloat16"
#: What all servers are given: small steps, so that prompts of 300 tokens and more come in chunks.
COMMON = (
    "--dtype", HALF, "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "256", "--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256",
)  # fmt: skip


#: For stages: vLLM's worker on a processor makes what it keeps between two of them while it warms up, and it does that only for what is traced.
TRACED = ("--no-enforce-eager", "--compilation-config", '{"mode": 2, "backend": "eager"}')


def kinds(block: tuple[int, int] = (128, 128), tp: tuple[int, int] = (1, 1)) -> tuple[Kind, Kind]:
    """A prefill and a decode server."""

    def arguments(number: int) -> tuple[str, ...]:
        return ("--block-size", str(block[number]), "--tensor-parallel-size", str(tp[number]))

    def cores(number: int) -> str:
        return "0" if tp[number] == 1 and number == 0 else "1" if tp[number] == 1 else "0|1"

    return (
        Kind("prefill", "kv_producer", 8100, 5600, cores(0), arguments(0)),
        Kind("decode", "kv_consumer", 8200, 5700, cores(1), arguments(1)),
    )


@contextmanager
def pair(
    setting: Setting, p: Kind, d: Kind, block: tuple[int, int] = (128, 128), dtype: str | None = None
) -> Iterator[Pair]:
    """Both, started, and ended in the end."""
    setting = replace(setting, arguments=COMMON)
    with ExitStack() as ends:
        servers = [Server(setting, kind) for kind in (p, d)]
        for server in servers:
            ends.callback(server.stop)
        wait_for(servers)
        yield Pair(servers[0], servers[1], Model.read(p.model or setting.model, dtype), block)


def shm(setting: Setting) -> Iterator[str]:
    """Both on one host, through shared memory and the kernel's copies: all lengths, prefixes, many at a time."""
    yield from _all(setting, {"KVX_BACKEND": "shm"})


def ucx(setting: Setting) -> Iterator[str]:
    """The same over UCX, TCP alone."""
    yield from _all(setting, {"KVX_BACKEND": "ucx", "UCX_TLS": "tcp,self"})


def _all(setting: Setting, environment: dict[str, str]) -> Iterator[str]:
    setting = replace(setting, environment=setting.environment | environment)
    with pair(setting, *kinds()) as both:
        yield scenarios.lengths(both)
        yield scenarios.prefixes(both)
        yield scenarios.concurrent(both)
        yield scenarios.by_proxy(both)


def spoil(setting: Setting) -> Iterator[str]:
    """A decode server that zeroes a block of what it received has other tokens."""
    p, d = kinds()
    d.connector = {"kv_connector": "SpoilConnector", "kv_connector_module_path": "spoil"}
    d.environment = {"PYTHONPATH": _path(setting)}
    with pair(setting, p, d) as both:
        yield scenarios.spoilt(both)


def _path(setting: Setting) -> str:
    return os.pathsep.join(part for part in (str(HERE), os.environ.get("PYTHONPATH", "")) if part)


def blocks(setting: Setting) -> Iterator[str]:
    """Blocks of 64 tokens to 128, and of 128 to 32."""
    for sizes in ((64, 128), (128, 32)):
        with pair(setting, *kinds(sizes), sizes) as both:
            yield f"{sizes}: {scenarios.lengths(both)}"
            yield f"{sizes}: {scenarios.prefixes(both)}"
            yield f"{sizes}: {scenarios.concurrent(both, 8)}"


def tp(setting: Setting) -> Iterator[str]:
    """One tensor parallel rank to two, and two to one; five rounds each. In 32 bits: two ranks round their sums otherwise than one does."""
    for sizes in ((1, 2), (2, 1)):
        servers = kinds(tp=sizes)
        for kind in servers:
            kind.arguments = (*kind.arguments, "--dtype", "float32")
        with pair(setting, *servers, dtype="float32") as both:
            for turn in range(5):
                yield f"{sizes}, round {turn + 1}: {scenarios.lengths(both)}"
            yield f"{sizes}: {scenarios.concurrent(both, 8)}"


def tp16(setting: Setting) -> Iterator[str]:
    """One tensor parallel rank to two, and two to one, in 16 bits: the bytes that arrive are those that were sent."""
    for sizes in ((1, 2), (2, 1)):
        written = setting.logs / f"witness-{sizes[0]}-{sizes[1]}"
        written.mkdir(exist_ok=True)
        for old in written.iterdir():
            old.unlink()
        servers = kinds(tp=sizes)
        for kind in servers:
            kind.connector = {"kv_connector": "WitnessConnector", "kv_connector_module_path": "witness"}
            kind.extra = {"kv_connector_extra_config": {"digests": True}}
            kind.environment = {"PYTHONPATH": _path(setting), "KVX_WITNESS": str(written)}
        with pair(setting, *servers) as both:
            yield f"{sizes}: {ranks.bytes_are_the_same(both, written, 5)}"


def pp(setting: Setting) -> Iterator[str]:
    """Two pipeline stages to one, and one to two."""
    for stages in ((2, 1), (1, 2)):
        both = kinds(tp=stages)
        for kind, count in zip(both, stages, strict=True):
            kind.arguments = ("--block-size", "128", "--pipeline-parallel-size", str(count), *TRACED)
        with pair(setting, *both) as servers:
            yield f"{stages}: {scenarios.lengths(servers)}"
            yield f"{stages}: {scenarios.concurrent(servers, 8)}"


def hybrid(setting: Setting) -> Iterator[str]:
    """A model whose layers have windows and whose cache groups share memory."""
    p, d = kinds()
    p.model = d.model = setting.model.parent / "gemma"
    # Gemma 3 is not computed in float16.
    dtype = "float32" if HALF == "float16" else HALF
    for kind in (p, d):
        kind.arguments = (*kind.arguments, "--dtype", dtype)
    with pair(setting, p, d, dtype=dtype) as both:
        yield scenarios.lengths(both)
        yield scenarios.concurrent(both, 8)


def dead(setting: Setting) -> Iterator[str]:
    """The prefill server is killed in the middle of it, and the decode server is; by both policies."""
    cycles, lease_s = int(os.environ.get("KVX_E2E_CYCLES", "2")), 10.0
    for policy in ("recompute", "fail"):
        p, d = kinds()
        p.extra = {"kv_connector_extra_config": {"lease_s": lease_s}}
        d.extra = {"kv_load_failure_policy": policy, "kv_connector_extra_config": {"deadline_s": 20}}
        with pair(setting, p, d) as both:
            yield from (f"{policy}: {line}" for line in deaths.producers(both, cycles, policy == "recompute"))
            if policy == "recompute":
                yield from deaths.consumers(both, cycles, lease_s)


def differ(setting: Setting) -> Iterator[str]:
    """Another model, element type or version on one side: named, and both go on."""
    setting = replace(setting, arguments=COMMON)
    p, d = kinds()
    other = replace(d, name="other-model", port=8300, side_port=5800, model=setting.model.parent / "other")
    half = replace(d, name="other-dtype", port=8400, side_port=5900, arguments=(*d.arguments, "--dtype", "float32"))
    with ExitStack() as ends:
        servers = [Server(setting, kind) for kind in (p, other, half)]
        for server in servers:
            ends.callback(server.stop)
        wait_for(servers)
        models, dtypes = (Pair(servers[0], server, Model.read(setting.model), (128, 128)) for server in servers[1:])
        names = [server.kind.model or setting.model for server in servers]
        yield wrong.refused(models, f"facts: model: producer has {names[0]}, consumer has {names[1]}")
        yield wrong.refused(dtypes, f"facts: kv_dtype: producer has {HALF}, consumer has float32")
        # The same prefill server, and one that fits.
        for server in servers[1:]:
            server.stop()
        servers.append(Server(setting, d))
        ends.callback(servers[-1].stop)
        servers[-1].wait()
        fits = Pair(servers[0], servers[-1], Model.read(setting.model), (128, 128))
        yield wrong.refused(fits, "schema: this side has schema 1, the ticket has schemas 90 to 91", {"schema": [90, 91]})
        yield f"then {scenarios.lengths(fits)}"


def nixl(setting: Setting) -> Iterator[str]:
    """Beside NixlConnector, in turns: each as it is, then both over TCP. Wants NIXL in the same virtual environment."""
    for name, environment in BESIDE_NIXL.items():
        with beside_nixl(setting, environment) as (ours, theirs):
            yield from (f"{name}: {line}" for line in compare.first_tokens(ours, theirs))
            yield from (f"{name}: {line}" for line in compare.steps(ours, theirs))


BESIDE_NIXL: dict[str, dict[str, str]] = {
    "as they are": {},
    "over TCP": {"KVX_BACKEND": "ucx", "UCX_TLS": "tcp,self"},
}


@contextmanager
def beside_nixl(setting: Setting, environment: dict[str, str]) -> Iterator[tuple[Pair, Pair]]:
    """A pair of servers with kvx, and one with NixlConnector."""
    setting = replace(setting, environment=setting.environment | environment)
    theirs = []
    for kind in kinds():
        kind.connector, kind.name = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}, f"nixl-{kind.name}"
        kind.port, kind.side_port = kind.port + 400, kind.side_port + 400
        theirs.append(kind)
    with pair(setting, *kinds()) as ours, pair(setting, theirs[0], theirs[1]) as other:
        yield ours, other


ALL: dict[str, Callable[[Setting], Iterator[str]]] = {
    "shm": shm,
    "ucx": ucx,
    "spoil": spoil,
    "blocks": blocks,
    "tp": tp,
    "tp16": tp16,
    "pp": pp,
    "hybrid": hybrid,
    "dead": dead,
    "differ": differ,
    "nixl": nixl,
}
