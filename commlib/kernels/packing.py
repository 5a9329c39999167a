"""Packing: copy many small arrays to one or back, in one call without the GIL. numpy takes a microsecond per array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.kernels.machine_code import entry_point

Arrays = Sequence[Any]  # contiguous numpy arrays


def pack(arrays: Arrays, nbytes: Any, buffer: int) -> None:
    """Copy contiguous arrays, with these numbers of bytes (int64), one after another to the address `buffer`."""
    _copy(arrays, nbytes, buffer, into_buffer=True)


def unpack(buffer: int, arrays: Arrays, nbytes: Any) -> None:
    """Copy consecutive bytes at `buffer` to arrays, the inverse of `pack`."""
    _copy(arrays, nbytes, buffer, into_buffer=False)


def _copy(arrays: Arrays, nbytes: Any, buffer: int, *, into_buffer: bool) -> None:
    objects = np.fromiter(map(id, arrays), np.int64, len(arrays))
    entry_point("pack.copy_all", 5)(address_of(objects), address_of(nbytes), len(objects), buffer, into_buffer)
