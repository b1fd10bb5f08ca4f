"""Reads what vLLM knows of its model and its caches into kvx's own words. Needs vLLM; decides nothing: see :mod:`kvx.vllm.layout`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from . import layout
from .layout import Cache, Place, UnknownLayoutError
from .scheduler import Shape

#: Specifications of caches that kvx knows, by the exact name of their class: one that is derived from them may mean something else.
KNOWN_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")

#: What of a model's configuration says nothing about its caches, or differs from host to host.
_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache")


def shape(vllm_config: Any, kv_cache_config: Any) -> Shape:
    """What the scheduler knows of the caches."""
    groups, windows, local = [], [], set()
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        groups.append(_group(kv_cache_config, group))
        if not getattr(group, "enable_kv_transfer", True):
            local.add(number)
            continue
        windows += [window[1] for _, spec in _specs(group) if (window := _window(spec))]
    parallel = vllm_config.parallel_config
    return Shape(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        groups=groups,
        local_only=frozenset(local),
        window=min(windows, default=None),
    )


def place(vllm_config: Any) -> Place:
    """Where this worker stands. Refuses context parallelism by name."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnknownLayoutError(f"{name} is {getattr(parallel, name)}: kvx.vllm does not know how tokens are divided then")
    tp, pp = get_tp_group(), get_pp_group()
    return Place(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)


def shared_life() -> bytes:
    """A random life that all ranks of this replica agree on."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    life = os.urandom(16)
    # First along each column of stages, then across the columns: all have that of the first rank.
    for group in (get_pp_group(), get_tp_group()):
        if group.world_size > 1:
            life = group.broadcast_object(life, src=0)
    return life


def facts(vllm_config: Any, name: str | None) -> dict[str, str]:
    """What must be equal on both sides."""
    model = vllm_config.model_config
    text = model.hf_text_config
    stated = {
        "model": name or model.model,
        # After the model's name: where both differ, the name is what says so.
        "model_config": _digest(text.to_dict()),
        "kv_dtype": _cache_dtype(vllm_config),
        "layers": str(model.get_total_num_hidden_layers()),
        "kv_heads": str(model.get_total_num_kv_heads()),
        "head_dim": str(model.get_head_size()),
        "quantization": str(model.quantization or "none"),
    }
    if model.revision:
        stated["revision"] = str(model.revision)
    return stated


def caches(vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any]) -> tuple[list[Cache], list[dict[str, Any]]]:
    """All caches that are to be moved, and the engine's groups."""
    found, groups = [], []
    order = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        described = _group(kv_cache_config, group)
        groups.append(described)
        if not getattr(group, "enable_kv_transfer", True):
            continue
        backends = _backends(vllm_config, group.layer_names)
        described["kernel_block_tokens"] = _kernel_block(kv_cache_config, group, backends)
        for name, spec in _specs(group):
            tensor = tensors.get(name)
            if tensor is None:
                raise UnknownLayoutError(f"{name}: vLLM registers no tensor for it")
            if not hasattr(tensor, "untyped_storage"):
                raise UnknownLayoutError(f"{name}: vLLM registers a {type(tensor).__name__} for it, not a tensor")
            found.append(_cache(name, number, spec, backends[name], order, described["kernel_block_tokens"], tensor))
    return found, groups


def _specs(group: Any) -> Iterator[tuple[str, Any]]:
    """The specification of each layer of a group. Refuses what is not known."""
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    for name in group.layer_names:
        one = own[name] if own is not None else spec
        kind = type(one).__name__
        if kind not in KNOWN_SPECS:
            raise UnknownLayoutError(f"{name}: kvx.vllm does not know caches of {kind}; it knows {', '.join(KNOWN_SPECS)}")
        if one.tokens_per_state != 1:
            raise UnknownLayoutError(f"{name}: it keeps one state for {one.tokens_per_state} tokens; kvx.vllm knows 1")
        if one.num_head_slots not in (None, one.num_kv_heads) or one.state_content_bytes is not None:
            raise UnknownLayoutError(f"{name}: its backend packs heads or scales in a way that kvx.vllm does not know")
        yield name, one


def _window(spec: Any) -> tuple[str, int] | None:
    match type(spec).__name__:
        case "SlidingWindowSpec":
            return "sliding", spec.sliding_window
        case "ChunkedLocalAttentionSpec":
            return "chunked", spec.attention_chunk_size
        case _:
            # Also a layer with a window whose cache keeps all tokens.
            return None


def _group(kv_cache_config: Any, group: Any) -> dict[str, Any]:
    tokens = group.kv_cache_spec.block_size
    return layout.group(tokens, tokens, kv_cache_config.num_blocks)


def _backends(vllm_config: Any, names: list[str]) -> dict[str, Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    missing = [name for name in names if name not in layers]
    if missing:
        raise UnknownLayoutError(f"{missing[0]}: vLLM names no attention layer for it")
    return {name: layer.get_attn_backend() for name, layer in layers.items()}


def _kernel_block(kv_cache_config: Any, group: Any, backends: Mapping[str, Any]) -> int:
    """Tokens per block of the attention kernel: vLLM's own rule."""
    from vllm.v1.worker.utils import select_common_block_size

    tokens = group.kv_cache_spec.block_size
    placed = [it for it in kv_cache_config.kv_cache_tensors if not set(it.layers).isdisjoint(group.layer_names)]
    if any(it.block_stride > it.layer_stride for it in placed):
        return tokens
    pairs = dict.fromkeys((backends[name], spec) for name, spec in _specs(group))
    return select_common_block_size(tokens, [backend for backend, _ in pairs], [spec for _, spec in pairs])


def _cache(name: str, group: int, spec: Any, backend: Any, order: str, kernel: int, tensor: Any) -> Cache:
    blocks = tensor.shape[0]
    storage = tensor.untyped_storage()
    return Cache(
        name=name,
        group=group,
        spec=type(spec).__name__,
        block_tokens=spec.block_size,
        kernel_block_tokens=kernel,
        kv_heads=spec.num_kv_heads,
        key_dim=spec.head_size,
        value_dim=spec.head_size_v,
        dtype=str(tensor.dtype).removeprefix("torch."),
        window=_window(spec),
        shards=spec.max_tp_shards,
        backend=backend.get_name(),
        variant=_variant(backend.get_name(), spec, kernel),
        order=order,
        shape=(blocks, *tensor.shape[1:]),
        strides=tuple(tensor.stride()),
        address=tensor.data_ptr(),
        storage_address=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        device=tensor.device.type,
    )


def _variant(backend: str, spec: Any, kernel: int) -> str | None:
    """What of the processor the backend uses, where that changes what a block looks like."""
    if backend != "CPU_ATTN":
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(spec.dtype, kernel, spec.head_size))


def _cache_dtype(vllm_config: Any) -> str:
    asked = vllm_config.cache_config.cache_dtype
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if asked == "auto" else str(asked)


def _digest(config: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in config.items() if name not in _VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()
