"""Foreign arrays: describe what any library has in a GPU's memory, and be in order with whoever makes its contents."""

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

_BFLOAT16_BITS = np.dtype("V2")  # what ml_dtypes, PyTorch and CuPy call it there


@dataclass(frozen=True, slots=True)
class Described:
    """Say where an array is. stream: where its contents come to be, as a number; 0 is CUDA's default stream.

    None: nothing has to be waited for. keep: what keeps the memory, beside the array.
    """

    address: int
    shape: tuple[int, ...]
    dtype: Any
    contiguous: bool
    read_only: bool = False
    stream: int | None = None
    keep: Any = None


def speaks(kind: type) -> bool:
    """Return whether arrays of a type can say that they are on a GPU."""
    return hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__")


def gpu_of(x: Any) -> int | None:
    """Return the number of the GPU that has an array, -1 if it does not say which, None if it is elsewhere."""
    if hasattr(type(x), "__dlpack_device__"):
        where, number = x.__dlpack_device__()
        return int(number) if where in (dlpack.CUDA, dlpack.CUDA_MANAGED) else None
    return None if getattr(x, "__cuda_array_interface__", None) is None else -1


def by_interface(interface: dict[str, Any]) -> Described:
    """Describe an array by its `__cuda_array_interface__` (versions 2 and 3)."""
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if dtype == _BFLOAT16_BITS:
        dtype = NUMPY["bfloat16"]
    address, read_only = interface["data"]
    stream = interface.get("stream")
    return Described(
        address or 0,
        shape,
        dtype,
        is_contiguous(shape, interface.get("strides"), dtype.itemsize),
        bool(read_only),
        None if stream is None else plain_number(stream),
    )


def by_dlpack(x: Any, stream: int) -> Described:
    """Describe an array by DLPack; `stream`, the number of the current one, waits for its contents. UsageError."""
    try:
        capsule, after = x.__dlpack__(stream=stream or LEGACY_DEFAULT), None
    except RuntimeError:  # TensorFlow takes no stream: then contents are there for the default one, as DLPack has it
        capsule, after = x.__dlpack__(), 0
    there = dlpack.read(capsule)
    contiguous = is_contiguous(there.shape, there.strides, there.dtype.itemsize)
    return Described(there.address, there.shape, there.dtype, contiguous, stream=after, keep=capsule)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item: int) -> bool:
    """Return whether elements follow each other; strides in bytes, None: they do."""
    if strides is None or math.prod(shape) == 0:
        return True
    expected = item
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def plain_number(stream: int) -> int:
    """Return a stream's number with one name for the default stream, which has two."""
    return 0 if stream == LEGACY_DEFAULT else stream


Find = Callable[[Any], int]

# By the type of arrays: what finds the stream of their library that is current in this thread, as a number.
_CURRENT: dict[type, Find] = {}


def register_stream(kind: type, find: Find) -> None:
    """Say how the stream is found on which a library makes the contents of arrays of a type. For adapters."""
    _CURRENT[kind] = find


def current_of(x: Any) -> int | None:
    """Return the number of the current stream of the library that made an array; None if that is not known."""
    for kind in type(x).__mro__:
        if (find := _CURRENT.get(kind)) is not None:
            return plain_number(find(x))
    return None
