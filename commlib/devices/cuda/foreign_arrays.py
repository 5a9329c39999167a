"""Foreign arrays: describe GPU arrays of any library, and find the stream that writes their contents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers import dlpack
from commlib.dtypes import NUMPY

# The default stream, as DLPack and __cuda_array_interface__ number it; its address is 0.
LEGACY_DEFAULT = 1

_BFLOAT16_BITS = np.dtype("V2")  # the typestr of ml_dtypes, PyTorch and CuPy


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """The location and layout of an array. stream: the number of the stream that writes its contents.

    0 is CUDA's default stream; None means no wait is needed. owner: another object, if the array alone does not keep
    the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: Any
    contiguous: bool
    read_only: bool = False
    stream: int | None = None
    owner: Any = None


def has_gpu_interface(kind: type) -> bool:
    """Return whether arrays of a type have a GPU interface."""
    return hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__")


def gpu_of(x: Any) -> int | None:
    """Return the GPU index of an array, -1 if the array does not report it, None if it is not on a GPU."""
    if hasattr(type(x), "__dlpack_device__"):
        where, number = x.__dlpack_device__()
        return int(number) if where in (dlpack.CUDA, dlpack.CUDA_MANAGED) else None
    return None if getattr(x, "__cuda_array_interface__", None) is None else -1


def describe_interface(interface: dict[str, Any]) -> ForeignArray:
    """Describe an array by its `__cuda_array_interface__` (versions 2 and 3)."""
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if dtype == _BFLOAT16_BITS:
        dtype = NUMPY["bfloat16"]
    address, read_only = interface["data"]
    stream = interface.get("stream")
    return ForeignArray(
        address or 0,
        shape,
        dtype,
        is_contiguous(shape, interface.get("strides"), dtype.itemsize),
        bool(read_only),
        None if stream is None else plain_number(stream),
    )


def describe_dlpack(x: Any, stream: int) -> ForeignArray:
    """Describe an array by DLPack; the current stream `stream` waits for its contents. Raises UsageError."""
    try:
        capsule, after = x.__dlpack__(stream=stream or LEGACY_DEFAULT), None
    except RuntimeError:  # TensorFlow takes no stream argument: then DLPack orders on the default stream
        capsule, after = x.__dlpack__(), 0
    tensor = dlpack.read(capsule)
    contiguous = is_contiguous(tensor.shape, tensor.strides, tensor.dtype.itemsize)
    return ForeignArray(tensor.address, tensor.shape, tensor.dtype, contiguous, stream=after, owner=capsule)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    """Return whether an array is C-contiguous. strides: in bytes; None means contiguous."""
    if strides is None or math.prod(shape) == 0:
        return True
    expected = item
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def plain_number(stream: int) -> int:
    """Normalize a stream's number: the default stream has two numbers, 0 and 1."""
    return 0 if stream == LEGACY_DEFAULT else stream


Find = Callable[[Any], int]

# By array type: a function that returns the number of the library's current stream in this thread.
_CURRENT: dict[type, Find] = {}


def register_stream(kind: type, find: Find) -> None:
    """Register a function that returns the library's current stream for arrays of a type. For adapters."""
    _CURRENT[kind] = find


def current_stream_of(x: Any) -> int | None:
    """Return the number of the current stream of an array's library; None if unknown."""
    for kind in type(x).__mro__:
        if (find := _CURRENT.get(kind)) is not None:
            return plain_number(find(x))
    return None
