"""What must be where, worked out with NumPy from what the layouts' names are documented to mean: nothing of kvx's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvx

Elements = npt.NDArray[np.uint16]

#: Which shapes the named layouts have, and where K and V of a layer are in them: (block, token, head, dim) views.
NAMES = [
    "flash-attention-nhd",
    "flash-attention-hnd",
    "flash-infer-nhd",
    "flash-infer-hnd",
    "packed-nhd",
    "packed-hnd",
    "cross-layer-nhd",
    "cross-layer-hnd",
    "cpu-transposed",
]


@dataclass(frozen=True)
class Shape:
    """One engine's choices."""

    named: str
    tp: int = 1
    pp: int = 1
    block: int = 16
    blocks: int = 24


def element_views(
    shape: Shape, layers: int, heads: int, dim: int, regions: list[Elements], place: dict[tuple[int, str], int]
) -> dict[tuple[int, str], Elements]:
    """For each local layer and ``k`` or ``v``: a view of the rank's memory with axes (block, token, head, dim).

    ``place`` says in which region a local layer's ``key`` or ``value`` is.
    """
    b, t = shape.blocks, shape.block
    views: dict[tuple[int, str], Elements] = {}
    for layer in range(layers):
        key, value = regions[place[layer, "key"]], regions[place[layer, "value"]]
        match shape.named:
            case "flash-attention-nhd":
                k, v = (half.reshape(b, t, heads, dim) for half in (key, value))
            case "flash-attention-hnd":
                k, v = (half.reshape(b, heads, t, dim).transpose(0, 2, 1, 3) for half in (key, value))
            case "flash-infer-nhd":
                both = key.reshape(b, 2, t, heads, dim)
                k, v = both[:, 0], both[:, 1]
            case "flash-infer-hnd":
                both = key.reshape(b, 2, heads, t, dim).transpose(0, 1, 3, 2, 4)
                k, v = both[:, 0], both[:, 1]
            case "packed-nhd":
                both = key.reshape(b, t, heads, 2 * dim)
                k, v = both[..., :dim], both[..., dim:]
            case "packed-hnd":
                both = key.reshape(b, heads, t, 2 * dim).transpose(0, 2, 1, 3)
                k, v = both[..., :dim], both[..., dim:]
            case "cross-layer-nhd":
                both = key.reshape(b, layers, 2, t, heads, dim)[:, layer]
                k, v = both[:, 0], both[:, 1]
            case "cross-layer-hnd":
                both = key.reshape(b, heads, layers, 2, t, dim)[:, :, layer].transpose(0, 2, 3, 1, 4)
                k, v = both[:, 0], both[:, 1]
            case "cpu-transposed":
                both = key.reshape(b, heads, 2 * t * dim)
                k = both[:, :, : t * dim].reshape(b, heads, dim, t).transpose(0, 3, 1, 2)
                v = both[:, :, t * dim :].reshape(b, heads, t, dim).transpose(0, 2, 1, 3)
            case other:
                raise AssertionError(other)
        views[layer, "k"], views[layer, "v"] = k, v
    return views


class Cache:
    """An engine's ranks and their memory, as an engine with NumPy for tensors would have them."""

    def __init__(self, shape: Shape, model: tuple[int, int, int], seed: int) -> None:
        self.shape = shape
        self.layers, self.heads, self.dim = model
        self.model = kvx.Model.llama_like(*model, "bf16")
        self.layouts = self.model.layouts(
            shape.named, blocks=shape.blocks, block_tokens=shape.block, tp=shape.tp, pp=shape.pp
        )
        self.random = np.random.default_rng(seed)
        self.memory: list[list[Elements]] = []

    def lend(self, regions: list[list[kvx.Region]] | None = None) -> list[list[kvx.Region]]:
        """Regions of every rank: over arrays of NumPy's, or over what kvx has allocated. Filled with what means nothing."""
        lent: list[list[kvx.Region]] = []
        for number, layout in enumerate(self.layouts):
            arrays: list[Elements] = []
            if regions is None:
                arrays = [np.empty(nbytes // 2, np.uint16) for nbytes in layout.region_bytes]
                lent.append([kvx.Region.of(array) for array in arrays])
            else:
                arrays = [np.asarray(region).view(np.uint16) for region in regions[number]]
                lent.append(regions[number])
            for array in arrays:
                array[:] = self.random.integers(0, 1 << 16, array.size, np.uint16)
            self.memory.append(arrays)
        return lent

    def put(self, request: dict[tuple[int, str], Elements], ids: list[int], memory: list[list[Elements]] | None = None) -> None:
        """Puts a request's elements, (token, head, dim) for each layer and ``k`` or ``v``, into its blocks, at every rank."""
        shape = self.shape
        memory = self.memory if memory is None else memory
        for rank, arrays in enumerate(memory):
            stage, tp = divmod(rank, shape.tp)
            share, rest = divmod(self.layers, shape.pp)
            first_layer = stage * share + min(stage, rest)
            layers = share + (stage < rest)
            # Heads: dealt out in order, or the same for several ranks where there are more ranks than heads.
            first = tp * self.heads // shape.tp
            last = first + 1 if shape.tp > self.heads else (tp + 1) * self.heads // shape.tp
            tensors = self.layouts[rank].tensors
            place = {(tensor["layer"] - first_layer, tensor["role"]): tensor["region"] for tensor in tensors}
            views = element_views(shape, layers, last - first, self.dim, arrays, place)
            for (layer, which), view in views.items():
                elements = request[first_layer + layer, which]
                for token in range(elements.shape[0]):
                    view[ids[token // shape.block], token % shape.block] = elements[token, first:last]

    def request(self, tokens: int) -> dict[tuple[int, str], Elements]:
        """A request's elements."""
        size = (tokens, self.heads, self.dim)
        return {
            (layer, which): self.random.integers(0, 1 << 16, size, np.uint16)
            for layer in range(self.layers)
            for which in "kv"
        }

    def ids(self, tokens: int) -> list[int]:
        """Blocks for a request, in no order."""
        count = -(-tokens // self.shape.block)
        return [int(block) for block in self.random.permutation(self.shape.blocks)[:count]]

    def copy(self) -> list[list[Elements]]:
        """All memory as it is now."""
        return [[array.copy() for array in arrays] for arrays in self.memory]

    def is_as(self, expected: list[list[Elements]]) -> bool:
        """Whether every byte is as expected."""
        return all(
            np.array_equal(array, other)
            for arrays, others in zip(self.memory, expected, strict=True)
            for array, other in zip(arrays, others, strict=True)
        )
