"""Layouts are recognised by what vLLM says of them, and refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import kvx
from kvx.vllm.layout import Cache, Place, UnknownLayoutError, group, heads_of, layer_number, rank_layout

ALONE = Place(0, 1, 0, 1)
BLOCKS, TOKENS, HEADS, DIM = 10, 32, 2, 64


def cache(**changes: Any) -> Cache:
    """One layer, as vLLM 0.32 has it on a processor."""
    row = 2 * DIM
    plain = Cache(
        name="model.layers.3.self_attn.attn", group=0, spec="FullAttentionSpec", block_tokens=TOKENS, kernel_block_tokens=TOKENS,
        kv_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype="bfloat16", window=None, shards=None, backend="CPU_ATTN", variant="vec",
        order="LBHNC", shape=(BLOCKS, HEADS, TOKENS, row), strides=(HEADS * TOKENS * row, TOKENS * row, row, 1),
        address=0x10000 + 4096, storage_address=0x10000, storage_bytes=1 << 20, device="cpu",
    )  # fmt: skip
    return replace(plain, **changes)


def described(*caches: Cache, place: Place = ALONE, heads: int = HEADS) -> dict[str, Any]:
    """The layout of a rank with these caches."""
    return rank_layout(caches, [group(TOKENS, TOKENS, BLOCKS)] * 2, place, heads)[0]


def test_keys_are_transposed_on_a_processor() -> None:
    layout, regions = rank_layout([cache()], [group(TOKENS, TOKENS, BLOCKS)], ALONE, HEADS)
    assert regions == [(0x10000, 1 << 20)]
    key, value = layout["tensors"]
    head, block = TOKENS * 2 * DIM * 2, HEADS * TOKENS * 2 * DIM * 2
    assert (key["layer"], key["role"], key["base"], key["dtype"]) == (3, "key", 4096, "bf16")
    # Of each head: [dim][token], then [token][dim].
    assert (key["token"], key["dim"]) == ({"extent": TOKENS, "stride": 2}, {"extent": DIM, "stride": TOKENS * 2})
    assert (value["role"], value["base"]) == ("value", 4096 + TOKENS * DIM * 2)
    assert (value["token"], value["dim"]) == ({"extent": TOKENS, "stride": DIM * 2}, {"extent": DIM, "stride": 2})
    for tensor in (key, value):
        assert (tensor["head"], tensor["block"]) == ({"extent": HEADS, "stride": head}, {"extent": BLOCKS, "stride": block})


def test_layers_in_one_allocation_are_one_region_and_groups_may_alias() -> None:
    other = cache(name="model.layers.4.attn", address=0x10000 + 200_000)
    aliased = cache(name="model.layers.5.attn", group=1, window=("sliding", 100))
    layout = described(cache(), other, aliased)
    assert len(layout["regions"]) == 1
    assert [(tensor["layer"], tensor["window"]) for tensor in layout["tensors"][::2]] == [
        (3, "full"),
        (4, "full"),
        (5, {"sliding": 100}),
    ]


def test_a_layer_that_uses_anothers_cache_has_none_of_its_own() -> None:
    layout = described(cache(), cache(name="model.layers.9.attn"))
    assert {tensor["layer"] for tensor in layout["tensors"]} == {3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "FLASH_ATTN", "variant": None}, "FLASH_ATTN"),
        ({"variant": "amx"}, "CPU_ATTN/amx"),
        ({"variant": "amx"}, "--dtype float16"),
        ({"variant": "neon"}, "CPU_ATTN/neon"),
        ({"dtype": "uint8"}, "uint8"),
        ({"device": "cuda"}, "cuda"),
        ({"order": "LBNHC"}, "LBNHC"),
        ({"shape": (BLOCKS, TOKENS, HEADS, 2 * DIM)}, "shape"),
        ({"strides": (8192, 64, 128, 1)}, "stride"),
        ({"kv_heads": 4}, "4 heads"),
        ({"name": "model.attn"}, "which layer"),
        ({"name": "model.layers.3.experts.4.attn"}, "which layer"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnknownLayoutError, match=named) as refused:
        described(cache(**change))
    assert isinstance(refused.value, kvx.UnsupportedError)


def test_two_caches_of_one_layer_are_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="layer 3 has two caches"):
        described(cache(), cache(name="draft.layers.3.attn", address=0x10000 + 200_000))
    with pytest.raises(UnknownLayoutError, match="the same memory"):
        described(cache(), cache(name="draft.layers.3.attn"))


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [(2, 1, [(0, 2)]), (2, 2, [(0, 1), (1, 1)]), (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]), (8, 2, [(0, 4), (4, 4)])],
)
def test_heads_are_dealt_out_as_vllm_does(total: int, size: int, expected: list[tuple[int, int]]) -> None:
    for rank, (first, count) in enumerate(expected):
        place = Place(rank, size, 0, 1)
        assert heads_of(cache(kv_heads=count), place, total) == (first, total)
        # Where vLLM says how many shards there are, the model's own count is not asked.
        assert heads_of(cache(kv_heads=count, shards=total if size > total else size), place, 999) == (first, total)


def test_a_layers_number_is_in_its_name() -> None:
    assert layer_number("model.layers.12.self_attn.attn") == 12
    assert layer_number("language_model.model.layers.0.attn") == 0
