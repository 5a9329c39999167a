"""Packing: copy many small arrays to one or back, in one call without the GIL. numpy takes a microsecond per array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.node import DATA

Arrays = Sequence[Any]  # contiguous numpy arrays


@kernel(nogil=True)
def _copy_all(objects: Any, lengths: Any, buffer: int, into_buffer: bool) -> None:
    at = buffer
    for i in range(len(objects)):
        array = nb.carray(ins.as_pointer(objects[i] + DATA), 1, np.int64)[0]
        if into_buffer:
            ins.memcpy(at, array, lengths[i])
        else:
            ins.memcpy(array, at, lengths[i])
        at += lengths[i]


def pack(arrays: Arrays, nbytes: Any, buffer: int) -> None:
    """Copy contiguous arrays, with these numbers of bytes (int64), one after another to the address `buffer`."""
    _copy_all(np.fromiter(map(id, arrays), np.int64, len(arrays)), nbytes, buffer, True)


def unpack(buffer: int, arrays: Arrays, nbytes: Any) -> None:
    """Copy consecutive bytes at `buffer` to arrays, the inverse of `pack`."""
    _copy_all(np.fromiter(map(id, arrays), np.int64, len(arrays)), nbytes, buffer, False)
