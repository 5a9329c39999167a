"""Packing: copy many small arrays to one or back. `kernels.packing` has its Python side."""

from __future__ import annotations

from commlib.kernels.fields.arrays import DATA
from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.arrays import table
from commlib.kernels.host.compilation import kernel


@kernel(nogil=True)
def copy_all(objects: int, lengths: int, count: int, buffer: int, into_buffer: int) -> None:
    """Copy between arrays, given by their `id` and bytes in two tables, and consecutive bytes at an address."""
    arrays, nbytes = table(objects, count), table(lengths, count)
    at = buffer
    for i in range(count):
        array = ins.load_acquire(arrays[i] + DATA)
        if into_buffer:
            ins.memcpy(at, array, nbytes[i])
        else:
            ins.memcpy(array, at, nbytes[i])
        at += nbytes[i]
