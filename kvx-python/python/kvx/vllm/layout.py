"""The true layout of vLLM's KV caches, as kvx describes it.

What a block looks like inside is known by the attention backend that writes it, and by the cache's specification: never guessed from a
tensor's shape, which is only compared with what these say. What is not known is refused by name.

Nothing here needs vLLM or torch: :mod:`kvx.vllm.discover` reads their objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError

#: vLLM's id of the block that stands for no block.
NULL_BLOCK = 0

#: torch's names of element types, as kvx writes them, and their bytes.
DTYPES = {
    "float32": ("f32", 4),
    "float16": ("f16", 2),
    "bfloat16": ("bf16", 2),
    "float8_e4m3fn": ("fp8_e4m3", 1),
    "float8_e5m2": ("fp8_e5m2", 1),
}


class UnknownLayoutError(UnsupportedError):
    """A cache whose layout kvx does not know. The message names the layer and what is not known."""


@dataclass(frozen=True)
class Cache:
    """One layer's cache, as its specification, its attention backend and its tensor describe it."""

    name: str
    group: int
    #: The class of its specification: ``FullAttentionSpec`` ...
    spec: str
    block_tokens: int
    kernel_block_tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    #: torch's name of the element type.
    dtype: str
    #: Which tokens it needs: ``None`` all, ``("sliding", n)``, ``("chunked", n)``.
    window: tuple[str, int] | None
    #: Into how many shards its heads are divided before ranks hold copies; ``None`` where vLLM does not say.
    shards: int | None
    #: The attention backend's own name: ``CPU_ATTN`` ...
    backend: str
    #: What of the processor it uses, where that changes what a block looks like.
    variant: str | None
    #: vLLM's name of how blocks, heads and tokens are ordered: ``LBHNC`` ...
    order: str
    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    address: int
    storage_address: int
    storage_bytes: int
    device: str


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int


def layer_number(name: str) -> int:
    """The layer's number in the whole model, from its name.

    Raises:
        UnknownLayoutError: the name has no number, or several.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise UnknownLayoutError(f"{name}: its name does not say which layer of the model it is")
    return numbers[0]


def rank_layout(
    caches: Sequence[Cache], groups: Sequence[Mapping[str, Any]], place: Place, kv_heads: int
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The layout of one rank, as kvx reads it, and its regions as (address, bytes).

    ``groups`` are the engine's cache groups (:func:`group`), ``kv_heads`` the model's heads over all ranks.

    Raises:
        UnknownLayoutError: naming the layer, and what of it is not known or not as its specification says.
    """
    regions: dict[tuple[int, int], int] = {}
    tensors: list[dict[str, Any]] = []
    seen: dict[tuple[int, int], Cache] = {}
    for cache in caches:
        before = seen.setdefault((cache.group, cache.address), cache)
        if before is not cache:
            if layer_number(before.name) == layer_number(cache.name):
                raise UnknownLayoutError(f"{cache.name}: it has the same memory as {before.name}")
            # A layer that uses another's cache: there is nothing of its own to move.
            continue
        number = regions.setdefault((cache.storage_address, cache.storage_bytes), len(regions))
        tensors += _tensors(cache, number, groups[cache.group], place, kv_heads)
    named: set[tuple[int, str]] = set()
    for tensor in tensors:
        key = (tensor["layer"], tensor["role"])
        if key in named:
            raise UnknownLayoutError(f"layer {key[0]} has two caches of {key[1]}")
        named.add(key)
    layout = {
        "coords": {"grid": {"tp": place.tp_size, "pp": place.pp_size, "dp": 1}, "tp": place.tp, "pp": place.pp, "dp": 0},
        "regions": [{"bytes": size, "memory": "host"} for _, size in regions],
        "groups": list(groups),
        "tensors": tensors,
    }
    return layout, list(regions)


def group(block_tokens: int, kernel_block_tokens: int, blocks: int) -> dict[str, Any]:
    """An attention group, as kvx writes it."""
    return {
        "kind": "attention",
        "block_tokens": block_tokens,
        "kernel_block_tokens": kernel_block_tokens,
        "blocks": blocks,
        "null_block": NULL_BLOCK,
    }


def heads_of(cache: Cache, place: Place, kv_heads: int) -> tuple[int, int]:
    """The first head that this rank holds, and how many the layer has over all ranks.

    Raises:
        UnknownLayoutError: the rank's number of heads is not what a layer of so many is divided into.
    """
    total = kv_heads if cache.shards is None else cache.kv_heads * min(place.tp_size, cache.shards)
    first = place.tp * total // place.tp_size
    end = first + 1 if place.tp_size > total else (place.tp + 1) * total // place.tp_size
    if end - first != cache.kv_heads:
        raise UnknownLayoutError(
            f"{cache.name}: this rank has {cache.kv_heads} heads, where rank {place.tp} of {place.tp_size} has {end - first} of "
            f"{total}"
        )
    return first, total


def _tensors(
    cache: Cache, region: int, group: Mapping[str, Any], place: Place, kv_heads: int
) -> list[dict[str, Any]]:
    if cache.device != "cpu":
        raise UnknownLayoutError(
            f"{cache.name}: it is in memory of {cache.device}, and kvx reaches memory of the host only in this version"
        )
    if cache.dtype not in DTYPES:
        raise UnknownLayoutError(f"{cache.name}: kvx has no element type {cache.dtype}")
    inside = INSIDE.get((cache.backend, cache.variant))
    if inside is None:
        known = ", ".join(f"{backend}/{variant}" if variant else backend for backend, variant in INSIDE)
        found = (cache.backend, cache.variant)
        remedy = f"; {INSTEAD[found]}" if found in INSTEAD else ""
        raise UnknownLayoutError(
            f"{cache.name}: kvx does not know how the attention backend {cache.backend}"
            f"{'/' + cache.variant if cache.variant else ''} lays out a block; it knows {known}{remedy}"
        )
    first, total = heads_of(cache, place, kv_heads)
    dtype, size = DTYPES[cache.dtype]
    blocks = group["blocks"] * (cache.block_tokens // cache.kernel_block_tokens)
    base = cache.address - cache.storage_address
    window: Any = "full" if cache.window is None else {cache.window[0]: cache.window[1]}
    views = inside(cache, size)
    return [
        {
            "layer": layer_number(cache.name),
            "role": view.role,
            "dtype": dtype,
            "group": cache.group,
            "region": region,
            "base": base + view.offset,
            "block": {"extent": blocks, "stride": cache.strides[0] * size},
            "token": {"extent": cache.kernel_block_tokens, "stride": view.token},
            "head": {"extent": cache.kv_heads, "stride": view.head},
            "dim": {"extent": view.dim, "stride": view.step},
            "heads": {"first": first, "total": total},
            "granularity": "token",
            "window": window,
            "tokens": "all",
            "local_only": False,
        }
        for view in views
    ]


@dataclass(frozen=True)
class View:
    """A tensor within one block: offset and strides in bytes, ``dim`` elements ``step`` bytes apart."""

    role: str
    offset: int
    token: int
    head: int
    dim: int
    step: int


def _expect(cache: Cache, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise UnknownLayoutError(
            f"{cache.name}: {what} of its tensor is {found}, and {cache.backend} with {cache.spec} has {expected}"
        )


def _cpu_transposed(cache: Cache, size: int) -> list[View]:
    """Of each head first the keys, transposed (``[dim][token]``), then the values (``[token][dim]``)."""
    tokens, keys, values = cache.kernel_block_tokens, cache.key_dim, cache.value_dim
    row = keys + values
    _expect(cache, "the order", cache.order, "LBHNC")
    _expect(cache, "the shape", cache.shape[1:], (cache.kv_heads, tokens, row))
    _expect(cache, "a head's stride", cache.strides[1:], (tokens * row, row, 1))
    head = tokens * row * size
    return [
        View("key", 0, size, head, keys, tokens * size),
        View("value", tokens * keys * size, values * size, head, values, size),
    ]


#: What to do where a block looks otherwise than kvx knows. vLLM 0.32 takes AMX's tiles for bfloat16 and blocks of a multiple of 32 tokens only
#: (``_get_attn_isa`` in its ``cpu_attn.py``).
INSTEAD: dict[tuple[str, str | None], str] = {
    ("CPU_ATTN", "amx"): "give both instances --dtype float16 (or a --block-size that is no multiple of 32), which vLLM computes without AMX's tiles",
}

#: What a block looks like inside, by attention backend and variant. ``vec16`` differs from ``vec`` in how it computes only; ``amx`` and the
#: other variants of the CPU backend put keys into tiles of their own.
INSIDE: dict[tuple[str, str | None], Callable[[Cache, int], list[View]]] = {
    ("CPU_ATTN", "vec"): _cpu_transposed,
    ("CPU_ATTN", "vec16"): _cpu_transposed,
}
