"""Memory is taken as it is: never copied, kept alive, and refused by name where it cannot be used."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from engines import Build
from oracle import Shape

import kvx


class OnlyDlpack:
    """An array that shows itself by DLPack alone, as tensors do."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **how: Any) -> Any:
        self.asked.append(how)
        return self.array.__dlpack__()


class OnCuda:
    """An array on a CUDA device. The address is one that nobody may touch."""

    def __init__(self, nbytes: int, device: int | None = 1, readonly: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (1 << 21, readonly),
            "version": 3,
        }
        if device is not None:
            self.__dlpack_device__ = lambda: (2, device)


@pytest.mark.parametrize("show", [lambda array: array, OnlyDlpack], ids=["buffer", "dlpack"])
def test_nothing_is_copied(show: Any) -> None:
    array = np.arange(64, dtype=np.float32).reshape(4, 16)
    region = kvx.Region.of(show(array))
    assert (region.address, region.nbytes, region.memory) == (array.ctypes.data, 256, "host")
    region.write(0, b"\1\2\3\4")
    assert array.tobytes()[:4] == b"\1\2\3\4"
    array[0, 1] = 7
    assert region.read(4, 4) == np.float32(7).tobytes()


def test_buffers_of_every_kind() -> None:
    buffers: list[Any] = [
        bytearray(32),
        memoryview(bytearray(32)),
        mmap.mmap(-1, 4096),
        (ctypes.c_uint16 * 9)(),
        np.zeros((), np.int64),
    ]
    for buffer in buffers:
        region = kvx.Region.of(buffer)
        assert region.nbytes == memoryview(buffer).nbytes
        region.write(0, b"kvx")
        assert bytes(memoryview(buffer).cast("B")[:3]) == b"kvx"


def test_axes_in_another_order_are_the_same_bytes() -> None:
    array = np.zeros((3, 5, 7), np.uint16)
    for seen in (array, array.transpose(2, 0, 1), OnlyDlpack(array.transpose(1, 0, 2)), array[None]):
        region = kvx.Region.of(seen)
        assert (region.address, region.nbytes) == (array.ctypes.data, array.nbytes)


def test_the_owner_is_kept_while_it_is_registered_and_no_longer(build: Build) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    model = kvx.Model.llama_like(1, 2, 8)
    (layout,) = model.layouts("flash-attention-nhd", blocks=4, block_tokens=16)
    arrays = [np.zeros(nbytes, np.uint8).view(Array) for nbytes in layout.region_bytes]
    alive = [weakref.ref(array) for array in arrays]
    counts = [sys.getrefcount(array) for array in arrays]
    regions = [kvx.Region.of(array) for array in arrays]
    assert all(sys.getrefcount(array) > count for array, count in zip(arrays, counts))
    engine = kvx.Engine("owner", model, [kvx.Rank(layout, regions, [kvx.open_backend("shm")])], key=kvx.Key.generate())
    del regions, arrays
    gc.collect()
    assert all(one() is not None for one in alive)
    engine.close()
    del engine
    gc.collect()
    kvx.backends()
    assert all(one() is None for one in alive)


def test_a_bytearray_cannot_be_resized_meanwhile() -> None:
    owner = bytearray(64)
    region = kvx.Region.of(owner)
    with pytest.raises(BufferError):
        owner.extend(b"more")
    del region
    gc.collect()
    owner.extend(b"more")


def test_a_capsule_gives_its_tensor_back() -> None:
    array = np.zeros(64, np.uint8)
    count = sys.getrefcount(array)
    for _ in range(10):
        kvx.Region.of(OnlyDlpack(array))
    gc.collect()
    assert sys.getrefcount(array) == count


def test_what_cannot_be_registered_is_refused_and_says_why() -> None:
    readonly = np.zeros(8)
    readonly.flags.writeable = False
    wrong: list[tuple[Any, type[Exception], str]] = [
        (b"bytes", ValueError, "read-only"),
        (readonly, ValueError, "read-only"),
        (np.zeros((8, 8))[:, ::2], ValueError, "gaps"),
        (np.zeros(8)[::-1], ValueError, "backwards"),
        (np.broadcast_to(np.zeros(1), (8,)).copy()[:0], ValueError, "empty"),
        (OnlyDlpack(np.zeros((8, 8))[:, ::2]), ValueError, "gaps"),
        (OnlyDlpack(np.zeros(8), (13, 0)), ValueError, "cuda_managed"),
        (OnlyDlpack(np.zeros(8), (10, 0)), ValueError, "rocm"),
        (OnlyDlpack(np.zeros(8), (99, 0)), ValueError, "99"),
        (OnCuda(64, None), ValueError, "device="),
        (OnCuda(64, 0, readonly=True), ValueError, "read-only"),
        (object(), TypeError, "buffer protocol"),
        ("text", TypeError, "buffer protocol"),
        (None, TypeError, "buffer protocol"),
    ]
    for owner, kind, text in wrong:
        with pytest.raises(kind, match=text):
            kvx.Region.of(owner)
    with pytest.raises(ValueError, match="memory of the host"):
        kvx.Region.of(np.zeros(8), device=0)
    with pytest.raises(ValueError, match="CUDA device 1"):
        kvx.Region.of(OnCuda(64, 1), device=0)


def test_memory_of_a_cuda_device_is_never_taken_for_the_hosts(key: kvx.Key) -> None:
    region = kvx.Region.of(OnCuda(4096, 1))
    assert (region.memory, region.nbytes) == ("cuda:1", 4096)
    assert kvx.Region.of(OnCuda(4096, None), device=3).memory == "cuda:3"
    asked = OnlyDlpack(np.zeros(8), (2, 5))
    assert kvx.Region.of(asked).memory == "cuda:5"
    assert asked.asked == [{"stream": -1}]
    with pytest.raises(kvx.UnsupportedError, match="cuda:1"):
        region.read(0, 1)
    with pytest.raises(kvx.UnsupportedError, match="cuda:1"):
        region.view()
    assert not hasattr(region, "__array_interface__")
    # A layout on the host does not fit it, and one on the device is refused by the backend.
    (layout,) = kvx.Model.mla_like(1, 8).layouts("flash-attention-nhd", blocks=16, block_tokens=16)
    parts = layout.to_dict()
    for on_device in (False, True):
        if on_device:
            parts["regions"][0]["memory"] = {"cuda": 1}
        rank = kvx.Rank(kvx.Layout.from_dict(parts), [region], [kvx.open_backend("shm")])
        with pytest.raises(kvx.KvxError, match=r"(?i)cuda") as refused:
            kvx.Engine("cuda", kvx.Model.mla_like(1, 8), [rank], key=key)
        assert refused.value.kind == ("unsupported" if on_device else "config")


def test_a_region_that_is_too_small(key: kvx.Key) -> None:
    model = kvx.Model.llama_like(1, 1, 8)
    (layout,) = model.layouts("flash-attention-nhd", blocks=4, block_tokens=16)
    regions = [kvx.Region.host(nbytes - 1) for nbytes in layout.region_bytes]
    with pytest.raises(kvx.ConfigError, match="smaller than its layout says"):
        kvx.Engine("small", model, [kvx.Rank(layout, regions, [kvx.open_backend("shm")])], key=key)
    with pytest.raises(kvx.ConfigError, match="another number of regions"):
        kvx.Engine("few", model, [kvx.Rank(layout, regions[:1], [kvx.open_backend("shm")])], key=key)


@pytest.mark.parametrize("name", ["shm", "mock", None])
def test_memory_of_kvx_is_a_buffer(name: str | None) -> None:
    region = kvx.Region.host(4096) if name is None else kvx.open_backend(name).allocate(4096)
    assert len(region) == region.nbytes == 4096
    array, view = np.asarray(region), region.view()
    assert not array.any() and array.ctypes.data == region.address
    view[10] = 77
    assert array[10] == 77 and region.read(10, 1) == b"\x4d"
    with pytest.raises(kvx.MisuseError, match="outside the region"):
        region.read(4090, 7)
    with pytest.raises(kvx.MisuseError, match="outside the region"):
        region.write(4096, b"x")
    with pytest.raises(ValueError):
        region.read(-1, 1)
    # It stays for as long as somebody looks at it.
    del region
    gc.collect()
    array[:] = 5
    assert bytes(view[:3]) == b"\5\5\5"


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(kvx.ResourcesError):
        kvx.Region.host(1 << 60)
    with pytest.raises(kvx.MisuseError):
        kvx.Region.host(0)


def test_nothing_more_is_held_after_many_regions() -> None:
    array = np.zeros(1 << 16, np.uint8)
    count = sys.getrefcount(array)
    for _ in range(1000):
        region = kvx.Region.of(array)
        region.view()[0] = 1
    del region
    gc.collect()
    assert sys.getrefcount(array) == count
