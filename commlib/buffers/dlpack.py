"""DLPack: read the description of an array from a capsule (https://dmlc.github.io/dlpack).

An unconsumed capsule frees the array when the capsule is deleted; so users of the memory keep the capsule.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.dtypes import NUMPY, name_of

# Values of DLDeviceType.
CPU, CUDA, CUDA_HOST, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 11, 13

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class ArrayDescription:
    """The description of an array. strides: in bytes; None if the array is contiguous."""

    address: int
    device_type: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None


def read(capsule: Any) -> ArrayDescription:
    """Read the description in a capsule. Raises UsageError for an unsupported dtype."""
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    kind = _CODES.get(tensor.code, f"code {tensor.code} of ")
    name = "bool" if kind == "bool" else f"{kind}{tensor.bits}"
    dtype = NUMPY[name_of(name if tensor.lanes == 1 else f"{name}x{tensor.lanes}")]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    return ArrayDescription((tensor.data or 0) + tensor.byte_offset, tensor.device_type, shape, dtype, strides)
