"""Views: any framework's host array as a numpy array over the same memory, without a copy.

numpy reads most arrays (buffer protocol, `__array_interface__`). It refuses bfloat16 through DLPack, so commlib reads
DLPack itself (`dlpack`). Plain numpy arrays need no view.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from typing import Any

import numpy as np
from numpy import ndarray

from commlib.buffers import dlpack
from commlib.dtypes import NUMPY, name_of
from commlib.errors import UsageError

log = logging.getLogger("commlib")

_HOST_DEVICES = {dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST}


class _Holder:
    """The base of numpy's view: it keeps the foreign array, and the capsule that pins it, alive."""

    def __init__(self, interface: dict[str, Any], *keep: Any) -> None:
        self.__array_interface__ = interface
        self._keep = keep


def _from_dlpack(x: Any) -> np.ndarray[Any, Any]:
    capsule = x.__dlpack__()
    described = dlpack.read(capsule)
    if described.device_type not in _HOST_DEVICES:
        raise UsageError(f"array on DLPack device type {described.device_type}: only host arrays are supported here")
    if 0 in described.shape:
        return np.empty(described.shape, described.dtype)
    stored = f"<V{described.dtype.itemsize}" if described.dtype == NUMPY["bfloat16"] else described.dtype.str
    data = (described.address, False)
    interface = {"shape": described.shape, "strides": described.strides, "typestr": stored, "data": data, "version": 3}
    return np.asarray(_Holder(interface, x, capsule)).view(described.dtype)


def _buffer(x: Any) -> memoryview | None:
    try:
        return memoryview(x)
    except TypeError:
        return None


def as_host(x: Any, verb: str, what: str = "x") -> np.ndarray[Any, Any]:
    """Return `x` as a numpy array over the same memory.

    Accepts numpy arrays and host objects with the buffer protocol, `__array_interface__` or `__dlpack__`. Raises
    UsageError for other objects and for unsupported dtypes.
    """
    buffer = None
    if isinstance(x, np.ndarray):
        array = x
    elif hasattr(x, "__cuda_array_interface__"):
        raise UsageError(f"{verb}: {what} is a {type(x).__module__} array on a GPU: copy it to the host first")
    elif isinstance(x, np.generic):
        array = np.asarray(x)
        array.flags.writeable = False  # a copy: a result written to it would be lost
    elif hasattr(x, "__array_interface__") or (buffer := _buffer(x)) is not None:
        array = np.asarray(x if buffer is None else buffer)
    elif hasattr(x, "__dlpack__"):
        try:
            array = _from_dlpack(x)
        except UsageError as error:
            raise UsageError(f"{verb}: {what}: {error}") from None
        except Exception as error:  # frameworks raise different errors, for example for tensors that require a gradient
            raise UsageError(
                f"{verb}: {what} of type {type(x).__name__} cannot be viewed on the host: {error}"
            ) from error
    else:
        raise UsageError(
            f"{verb}: {what} is a {type(x).__name__}: expected an array (numpy, or anything with the buffer protocol, "
            "__array_interface__ or __dlpack__); wrap a number as numpy.array(value)"
        )
    try:
        name_of(array.dtype)
    except UsageError as error:
        raise UsageError(f"{verb}: {what}: {error}") from None
    return array


@lru_cache(maxsize=1024)
def _log_staged(verb: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Log once per kind of call that it copies."""
    log.debug("%s: array of shape %s with strides %s is staged through a copy", verb, shape, strides)


def contiguous(array: np.ndarray[Any, Any], verb: str) -> np.ndarray[Any, Any]:
    """Return `array`, or a C-contiguous copy of it (staged; logged at level debug)."""
    if array.flags.c_contiguous:
        return array
    _log_staged(verb, array.shape, array.strides)
    return np.ascontiguousarray(array).reshape(array.shape)


def writable(array: np.ndarray[Any, Any], verb: str, what: str) -> np.ndarray[Any, Any]:
    """Return `array`. Raises UsageError if it is read-only."""
    if not array.flags.writeable:
        raise UsageError(f"{verb}: {what} is read-only, but the result is written to it: pass a writable array")
    return array


def _read_pointer(array: np.ndarray[Any, Any]) -> int:
    return _pointer_at(id(array) + object.__basicsize__).value or 0


def _numpy_pointer(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


_pointer_at = ctypes.c_void_p.from_address

# numpy's own attribute takes longer than a small collective, so read the pointer from the object: it is the first field
# of numpy's C struct (PyArrayObject_fields) after the object head. If that ever changes, use numpy's attribute.
_probe = np.zeros(2)
address_of = _read_pointer if _read_pointer(_probe[1:]) == _probe[1:].ctypes.data else _numpy_pointer
"""Return the address of an array's first element."""


def are_plain(x: Any, out: Any) -> bool:
    """Return whether a verb can read `x`, a numpy array, and write `out` directly. out: None means a new array."""
    if out is x:
        return bool(x.flags.carray)
    return bool(x.flags.c_contiguous) and (
        out is None or (type(out) is ndarray and out.dtype is x.dtype and out.shape == x.shape and out.flags.carray)
    )
