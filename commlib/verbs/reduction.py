"""all_reduce, reduce_scatter and reduce by schedules, and MPI's own all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.dtypes import NUMPY, Array, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.executor import Reducer, Region
from commlib.kernels.arithmetic import accumulator_dtype
from commlib.schedule import algorithms
from commlib.schedule.layout import Layout, even, uneven
from commlib.verbs.operation import Operation, Result, apart, describe, result, rows, source

if TYPE_CHECKING:
    from commlib.group import Group

_SMALL, _LARGE = 16 << 10, 512 << 10
_SEGMENT = 128 << 10


class _Accumulation:
    """A reduction's working memory: the array itself, or a wider copy of it that is rounded once at the end."""

    def __init__(self, x: Array, op: str, size: int) -> None:
        self._dtype = name_of(x.dtype)
        operation = kernel_operation(self._dtype, op)
        wide = accumulator_dtype(self._dtype, operation)
        self._divisor = size if operation == "mean" else 0
        self.widened = wide != self._dtype
        self.work = x.astype(NUMPY[wide]) if self.widened else x
        self.reducer = Reducer(wide, "sum" if operation == "mean" else operation)
        self._finisher = Reducer(wide, operation) if self._divisor else None

    def finish(self, part: Array, target: Array) -> None:
        """Write a reduced part of the working memory to `target`: divide, then round."""
        if self._finisher is not None and len(part):
            self._finisher.finish(part, self._divisor)
        if part.ctypes.data != target.ctypes.data:
            # Overflow to infinity is what rounding to a narrow float means, not something to warn of.
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = part.astype(target.dtype) if self.widened else part


def _working_copy(x: Array, target: Result, op: str, size: int) -> _Accumulation:
    """Return an accumulation of `x` that works in the result's memory where its dtype allows."""
    accumulation = _Accumulation(x, op, size)
    if not accumulation.widened:
        accumulation.work = target.flat
        if x.ctypes.data != target.flat.ctypes.data:
            target.flat[...] = x
    return accumulation


def all_reduce(comm: Group, x: Any, op: str, out: Any, algorithm: str) -> Operation:
    array = source(x, "all_reduce")
    target = result(out, array.shape, array.dtype, "all_reduce")
    kernel_operation(name_of(array.dtype), op)
    name = algorithm
    if algorithm == "auto":
        name = "recursive_doubling" if array.nbytes <= _SMALL else "ring"
        if _SMALL < array.nbytes <= _LARGE:
            name = "halving_doubling"
    elif algorithm == "node":
        name = "ring"  # of one rank: with more, the node path has taken the call
    elif algorithm not in algorithms("all_reduce"):
        known = ("auto", "node", "native", *algorithms("all_reduce"))
        raise UsageError(f"all_reduce has no algorithm {algorithm!r}; known are {', '.join(known)}")
    programs = comm.programs("all_reduce", name)
    flat = apart(array.reshape(-1), target.flat)

    def run() -> Any:
        accumulation = _working_copy(flat, target, op, comm.size)
        work = accumulation.work
        comm.execute(programs, lambda chunks: [Region(work, even(len(work), chunks))], text, accumulation.reducer)
        accumulation.finish(work, target.flat)
        return target.deliver()

    text = describe("all_reduce", array, f"op={op}", f"algorithm={algorithm}")
    return Operation(text, run)


def native_all_reduce(comm: Group, x: Any, op: str, out: Any) -> Operation:
    """MPI_Allreduce, in pieces: MPI libraries are several times faster in pieces than on one large array."""
    array = source(x, "all_reduce")
    target = result(out, array.shape, array.dtype, "all_reduce")
    dtype = name_of(array.dtype)
    operation = kernel_operation(dtype, op)
    if comm.native is None:
        raise UsageError("all_reduce: algorithm 'native' needs MPI, and this communicator has none")
    if accumulator_dtype(dtype, operation) != dtype:
        raise UsageError(f"all_reduce: algorithm 'native': MPI cannot reduce {dtype} by {op} without losing digits")
    from mpi4py import MPI

    mpi_op = {"mean": MPI.SUM, "or": MPI.LOR, "and": MPI.LAND}.get(operation) or getattr(MPI, operation.upper())
    piece = max(1, comm.config.native_kib * 1024 // array.itemsize)
    flat = apart(array.reshape(-1), target.flat)

    def run() -> Any:
        accumulation = _working_copy(flat, target, op, comm.size)
        work = accumulation.work
        for start in range(0, len(work), piece):
            comm.native.Allreduce(MPI.IN_PLACE, work[start : start + piece], mpi_op)
        accumulation.finish(work, target.flat)
        return target.deliver()

    return Operation(describe("all_reduce", array, f"op={op}", "algorithm=native"), run)


def _row_layout(length: int, row: int, size: int) -> Layout:
    return uneven(count * row for count in even(length, size).counts)


def reduce_scatter(comm: Group, x: Any, op: str, out: Any, algorithm: str) -> Operation:
    array = source(x, "reduce_scatter")
    length, row = rows(array, "reduce_scatter")
    kernel_operation(name_of(array.dtype), op)
    layout = _row_layout(length, row, comm.size)
    own = even(length, comm.size).counts[comm.rank]
    target = result(out, (own, *array.shape[1:]), array.dtype, "reduce_scatter")
    name = algorithm
    if algorithm == "auto":
        name = "recursive_halving" if array.nbytes <= _LARGE else "ring"
    programs = comm.programs("reduce_scatter", name)

    def run() -> Any:
        accumulation = _Accumulation(array.reshape(-1), op, comm.size)
        work = accumulation.work if accumulation.widened else accumulation.work.copy()  # the input stays as it is
        comm.execute(programs, lambda chunks: [Region(work, layout)], text, accumulation.reducer)
        start, stop = layout.offsets[comm.rank : comm.rank + 2]
        accumulation.finish(work[start:stop], target.flat)
        return target.deliver()

    text = describe("reduce_scatter", array, f"op={op}", f"algorithm={algorithm}", shape=True)
    return Operation(text, run)


def reduce(comm: Group, x: Any, op: str, root: int, out: Any, algorithm: str) -> Operation:
    array = source(x, "reduce")
    comm.check_root("reduce", root)
    kernel_operation(name_of(array.dtype), op)
    at_root = comm.rank == root
    target = result(out, array.shape, array.dtype, "reduce") if at_root else None
    name, segments = algorithm, 1
    if algorithm == "auto":
        name = "binomial_tree" if array.nbytes <= _LARGE else "chain"
    if name == "chain":
        segments = pipeline_segments(array.nbytes)
    programs = comm.programs("reduce", name, root=root, segments=segments)

    def run() -> Any:
        accumulation = _Accumulation(array.reshape(-1), op, comm.size)
        work = accumulation.work if accumulation.widened else accumulation.work.copy()
        comm.execute(programs, lambda chunks: [Region(work, even(len(work), chunks))], text, accumulation.reducer)
        if target is None:
            return None
        accumulation.finish(work, target.flat)
        return target.deliver()

    text = describe("reduce", array, f"op={op}", f"root={root}", f"algorithm={algorithm}")
    return Operation(text, run)


def pipeline_segments(nbytes: int) -> int:
    """Return into how many segments a pipelined chain cuts its data."""
    return min(64, max(1, nbytes // _SEGMENT))
