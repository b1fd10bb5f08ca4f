"""Whose memory a region is: what objects say of the memory that they own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from ._kvx import Region

# Kinds of memory, as DLPack numbers them.
_HOST = {1: "cpu", 3: "cuda_host", 11: "rocm_host"}
_CUDA = 2
_OTHERS = {
    4: "opencl",
    7: "vulkan",
    8: "metal",
    9: "vpi",
    10: "rocm",
    12: "ext_dev",
    13: "cuda_managed",
    14: "oneapi",
    15: "webgpu",
    16: "hexagon",
    17: "maia",
}


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def region_of(obj: object, device: int | None) -> Region:
    """See ``Region.of``."""
    if isinstance(obj, Region):
        return obj
    # Asked for first: what is on a device is never taken for memory of the host.
    cuda = getattr(obj, "__cuda_array_interface__", None)
    if cuda is not None:
        return _of_interface(obj, cuda, _ordinal(obj, device))
    if device is not None:
        raise ValueError(f"device={device}, but {_kind(obj)} is memory of the host")
    found = _of_buffer(obj)
    if found is None and hasattr(obj, "__dlpack__"):
        found = _of_dlpack(obj)
    if found is None:
        shown = getattr(obj, "__array_interface__", None)
        if shown is not None:
            found = _of_interface(obj, shown, None)
    if found is None:
        raise TypeError(
            f"{_kind(obj)} shows no memory: it has none of the buffer protocol, DLPack, __array_interface__ and "
            "__cuda_array_interface__"
        )
    return found


def view_of(region: Region, address: int, nbytes: int) -> memoryview:
    """See ``Region.view``."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    # Whoever has the view has the array, and with it the region.
    array._kvx_region = region  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _of_buffer(obj: object) -> Region | None:
    try:
        view = memoryview(obj)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # Not one; or a type of elements for which the protocol has no letter.
        return None
    _check(obj, view.readonly, view.nbytes)
    shape = view.shape or ()
    strides = view.strides or ()
    if not _is_dense(shape, strides, view.itemsize):
        raise _gaps(obj)
    if not view.c_contiguous:
        # One run of bytes, its axes in another order.
        return _at(_lowest(obj), view.nbytes, view)
    flat = view.cast("B") if view.format != "B" or view.ndim != 1 else view
    first = ctypes.c_char.from_buffer(flat)
    return _at(ctypes.addressof(first), view.nbytes, first)


def _lowest(obj: object) -> int:
    shown = getattr(obj, "__array_interface__", None)
    if shown is None:
        raise ValueError(f"the axes of {_kind(obj)} are not in the order of its memory: register it in that order")
    return int(shown["data"][0])


def _of_interface(obj: object, shown: dict[str, Any], device: int | None) -> Region:
    shape = tuple(shown["shape"])
    itemsize = int(shown["typestr"][2:])
    address, readonly = shown["data"]
    nbytes = itemsize * math.prod(shape)
    _check(obj, bool(readonly), nbytes)
    strides = shown.get("strides")
    if strides is not None and not _is_dense(shape, tuple(strides), itemsize):
        raise _gaps(obj)
    return _at(address, nbytes, obj, device)


def _of_dlpack(obj: Any) -> Region:
    # Asked for before anything is made: a capsule may cost a copy.
    kind, number = obj.__dlpack_device__()
    if int(kind) not in _HOST and int(kind) != _CUDA:
        name = _OTHERS.get(int(kind), f"of DLPack's kind {int(kind)}")
        raise ValueError(f"memory of {_kind(obj)} is {name}: kvx knows memory of the host and of CUDA devices")
    device = None if int(kind) in _HOST else int(number)
    # -1: nothing is read now, so nothing is waited for.
    capsule = obj.__dlpack__() if device is None else obj.__dlpack__(stream=-1)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    bits = tensor.dtype.bits * tensor.dtype.lanes
    if bits % 8:
        raise ValueError(f"elements of {_kind(obj)} are of {bits} bits: register its bytes")
    nbytes = bits // 8 * math.prod(shape)
    _check(obj, False, nbytes)
    if tensor.strides and not _is_dense(shape, [tensor.strides[axis] for axis in range(tensor.ndim)], 1):
        raise _gaps(obj)
    # Never marked as used, it gives the tensor back when the region lets go of it.
    return _at((tensor.data or 0) + tensor.byte_offset, nbytes, capsule, device)


def _at(address: int, nbytes: int, owner: object, device: int | None = None) -> Region:
    return Region.at_address(address, nbytes, owner, device=device)


def _check(obj: object, readonly: bool, nbytes: int) -> None:
    if readonly:
        raise ValueError(f"the memory of {_kind(obj)} is read-only: register memory that may be written")
    if nbytes == 0:
        raise ValueError(f"{_kind(obj)} is empty: a region has at least one byte")


def _is_dense(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """Whether elements of ``unit`` lie side by side, without a gap and none twice, in whatever order of axes."""
    expected = unit
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape) if extent != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _gaps(obj: object) -> ValueError:
    return ValueError(
        f"the memory of {_kind(obj)} has gaps, or runs backwards: register the whole of the memory that it is a part of"
    )


def _ordinal(obj: Any, device: int | None) -> int:
    said = None
    if hasattr(obj, "__dlpack_device__"):
        said = int(obj.__dlpack_device__()[1])
    if said is None and device is None:
        raise ValueError(f"{_kind(obj)} does not say which CUDA device it is on: pass device=")
    if said is not None and device is not None and said != device:
        raise ValueError(f"device={device}, but {_kind(obj)} is on CUDA device {said}")
    return device if said is None else said  # type: ignore[return-value]


def _kind(obj: object) -> str:
    kind = type(obj)
    return f"this {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else f"this {kind.__qualname__}"
