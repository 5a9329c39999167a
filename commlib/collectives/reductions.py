"""all_reduce, reduce_scatter and reduce: on a node's board, in a hierarchy, by schedules, and MPI's own all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives import hierarchical as hierarchy
from commlib.dtypes import BITWISE, NUMPY, Array, kernel_operation, name_of
from commlib.errors import UsageError
from commlib.execution.persistent import PERSISTENT_BYTES, PersistentAllReduce
from commlib.execution.streaming import Reducer, Region
from commlib.group.operation import Operation, apart, describe, result, rows, signature, source
from commlib.kernels.host.reduce import accumulator_dtype
from commlib.node.call import Arithmetic, Exchange, NodeCollective, ranges
from commlib.schedule import find
from commlib.schedule.layout import Layout, blocks, cut, even, uneven

if TYPE_CHECKING:
    from commlib.group.group import Group


class Accumulation:
    """What a reduction by messages works with: the array itself, or a wider copy of it that is rounded once at the end.

    once: nothing is combined twice on its way, so no copy needs to be wider.
    """

    def __init__(self, x: Array, op: str, size: int, *, once: bool = False) -> None:
        dtype = name_of(x.dtype)
        operation = kernel_operation(dtype, op)
        wide = dtype if once else accumulator_dtype(dtype, operation)
        self.widened = wide != dtype
        self.x = x.astype(NUMPY[wide]) if self.widened else x
        if once:
            self.reducer = Reducer(dtype, operation, size)
            self._finisher = None
        else:
            self.reducer = Reducer(wide, "sum" if operation == "mean" else operation)
            self._finisher = Reducer(wide, operation, size) if operation == "mean" and size > 1 else None
        self.arithmetic = Arithmetic(wide, "sum" if operation == "mean" else operation, self.x.itemsize, 0)

    def work_in(self, target: Array) -> Array:
        """Return an array with the input that may be overwritten: `target` where its dtype allows."""
        if self.widened:
            return self.x
        if address_of(self.x) != address_of(target):
            target[...] = self.x
        return target

    def finish(self, part: Array, target: Array) -> None:
        """Write a reduced part of the working memory to `target`: divide, then round."""
        if self._finisher is not None and len(part):
            self._finisher.combine([part], part)
        if address_of(part) != address_of(target):
            # Overflow to infinity is what rounding to a narrow float means, not something to warn of.
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = part.astype(target.dtype) if self.widened else part


def _is_widened(dtype: Any, op: str) -> bool:
    name = name_of(dtype)
    return accumulator_dtype(name, kernel_operation(name, op)) != name


def _choose(comm: Group, verb: str, algorithm: str, nbytes: int, dtype: Any, op: str) -> tuple[str, int]:
    """Return an algorithm among all ranks of the group, and into how many segments to cut the data."""
    if algorithm == "auto" and _is_widened(dtype, op):
        # On most ways partial sums travel, in a wider dtype; they may travel a better way, but twice the bytes.
        wide = NUMPY[accumulator_dtype(name_of(dtype), kernel_operation(name_of(dtype), op))].itemsize
        narrow = comm.choose(verb, "direct", comm.size, nbytes)
        others = comm.choose(verb, "auto", comm.size, nbytes * wide // dtype.itemsize)
        best = min(narrow, others, key=lambda choice: choice.seconds)
    else:
        best = comm.choose(verb, algorithm, comm.size, nbytes)
    return best.algorithm, best.segments


def all_reduce(comm: Group, x: Any, op: str, out: Any, algorithm: str) -> Operation:
    if algorithm == "native":
        return native_all_reduce(comm, x, op, out)
    array = source(x, "all_reduce")
    target = result(out, array.shape, array.dtype, "all_reduce")
    operation = kernel_operation(name_of(array.dtype), op)
    flat = apart(array.reshape(-1), target.flat)
    if comm.takes_node_path("all_reduce", algorithm):
        call = comm.node_calls.bound_all_reduce(flat, target.flat, op, algorithm)

        def run_on_node(keep: Any = (flat, x)) -> Any:
            call.run()
            return target.deliver()

        return Operation(call.text, run_on_node, compares=True)

    text = describe("all_reduce", array.size, array.dtype, f"op={op}", f"algorithm={algorithm}")
    if comm.takes_hierarchy("all_reduce", algorithm):

        def run_in_hierarchy() -> Any:
            if array.nbytes <= PERSISTENT_BYTES:

                def prepare() -> PersistentAllReduce:
                    return hierarchy.small_all_reduce(comm, array.dtype, operation, array.size, text)

                comm.run_prepared(text, op, flat, target.flat, prepare)
                return target.deliver()
            hierarchy.all_reduce(comm, Accumulation(flat, op, comm.size), target.flat, text)
            return target.deliver()

        return Operation(text, run_in_hierarchy)

    name, segments = _choose(comm, "all_reduce", algorithm, array.nbytes, array.dtype, op)
    pipelined = find("all_reduce", name).segmented
    program = comm.programs("all_reduce", name, segments=segments if pipelined else 1)

    if array.nbytes <= PERSISTENT_BYTES:

        def prepare() -> PersistentAllReduce:
            small = PersistentAllReduce(array.dtype, operation, array.size, comm.size)
            small.then_messages(program, comm.transport, signature(text), comm.on_wait(text))
            return small

        def run_prepared() -> Any:
            comm.run_prepared(text, op, flat, target.flat, prepare)
            return target.deliver()

        return Operation(text, run_prepared)

    def run() -> Any:
        accumulation = Accumulation(flat, op, comm.size, once=name == "direct")
        work = accumulation.work_in(target.flat)
        layouts = blocks(len(work), program.regions[0], 1 if pipelined else segments)
        comm.execute(program, [[Region(work, layout)] for layout in layouts], text, accumulation.reducer)
        accumulation.finish(work, target.flat)
        return target.deliver()

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

    if operation in BITWISE:
        mpi_op = getattr(MPI, f"{'L' if dtype == 'bool' else 'B'}{operation.upper()}")
    else:
        mpi_op = MPI.SUM if operation == "mean" else getattr(MPI, operation.upper())
    piece = max(1, comm.config.native_kib * 1024 // array.itemsize)
    flat = apart(array.reshape(-1), target.flat)

    def run() -> Any:
        accumulation = Accumulation(flat, op, comm.size)
        work = accumulation.work_in(target.flat)
        for start in range(0, len(work), piece):
            comm.native.Allreduce(MPI.IN_PLACE, work[start : start + piece], mpi_op)
        accumulation.finish(work, target.flat)
        return target.deliver()

    text = describe("all_reduce", array.size, array.dtype, f"op={op}", "algorithm=native")
    return Operation(text, run, meets=True)


def _row_layout(length: int, row: int, size: int) -> Layout:
    return uneven(count * row for count in even(length, size).counts)


def reduce_scatter(comm: Group, x: Any, op: str, out: Any, algorithm: str) -> Operation:
    array = source(x, "reduce_scatter")
    length, row = rows(array, "reduce_scatter")
    kernel_operation(name_of(array.dtype), op)
    layout = _row_layout(length, row, comm.size)
    own = even(length, comm.size).counts[comm.rank]
    target = result(out, (own, *array.shape[1:]), array.dtype, "reduce_scatter")
    flat = array.reshape(-1)
    start, stop = layout.slice_of(comm.rank)
    if np.may_share_memory(flat, target.flat) and address_of(target.flat) != address_of(flat[start:stop]):
        flat = flat.copy()  # where others still read
    if comm.takes_node_path("reduce_scatter", algorithm):
        call = comm.node_calls.verb(
            ("reduce_scatter", array.dtype, array.shape, op, algorithm),
            [start * array.itemsize] * comm.size,
            target.array.shape,
            lambda: NodeCollective.exchange(
                comm,
                describe("reduce_scatter", array.shape, array.dtype, f"op={op}", f"algorithm={algorithm}"),
                Exchange(
                    ranges(layout, array.itemsize),
                    [(0, (stop - start) * array.itemsize)] * comm.size,
                    max(layout.counts) * array.itemsize,
                ),
                Arithmetic.of(array.dtype, op, comm.size),
            ),
        )
        return call.operation(flat, target)

    text = describe("reduce_scatter", array.shape, array.dtype, f"op={op}", f"algorithm={algorithm}")
    if comm.takes_hierarchy("reduce_scatter", algorithm):

        def run_in_hierarchy() -> Any:
            hierarchy.reduce_scatter(comm, Accumulation(flat, op, comm.size), layout, target.flat, text)
            return target.deliver()

        return Operation(text, run_in_hierarchy)

    name, segments = _choose(comm, "reduce_scatter", algorithm, array.nbytes, array.dtype, op)
    program = comm.programs("reduce_scatter", name)

    def run() -> Any:
        accumulation = Accumulation(flat, op, comm.size, once=name == "direct")
        work = accumulation.x if accumulation.widened else flat.copy()  # the input stays as it is
        regions = [[Region(work, piece)] for piece in cut(layout, segments if program.sends_single_chunks else 1)]
        comm.execute(program, regions, text, accumulation.reducer)
        accumulation.finish(work[start:stop], target.flat)
        return target.deliver()

    return Operation(text, run)


def reduce(comm: Group, x: Any, op: str, root: int, out: Any, algorithm: str) -> Operation:
    array = source(x, "reduce")
    comm.check_root("reduce", root)
    kernel_operation(name_of(array.dtype), op)
    at_root = comm.rank == root
    target = result(out, array.shape, array.dtype, "reduce") if at_root else None
    flat = array.reshape(-1) if target is None else apart(array.reshape(-1), target.flat)
    if comm.takes_node_path("reduce", algorithm):
        nbytes = array.nbytes
        call = comm.node_calls.verb(
            ("reduce", array.dtype, array.shape, op, root, algorithm),
            [0] * comm.size,
            array.shape,
            lambda: NodeCollective.exchange(
                comm,
                describe("reduce", array.size, array.dtype, f"op={op}", f"root={root}", f"algorithm={algorithm}"),
                Exchange([(0, nbytes)], [(0, nbytes if at_root else 0)] * comm.size, nbytes),
                Arithmetic.of(array.dtype, op, comm.size),
            ),
        )
        return call.operation(flat, target)

    text = describe("reduce", array.size, array.dtype, f"op={op}", f"root={root}", f"algorithm={algorithm}")
    choice = comm.choose("reduce", algorithm, comm.size, array.nbytes)
    pipelined = find("reduce", choice.algorithm).segmented
    program = comm.programs("reduce", choice.algorithm, root=root, segments=choice.segments if pipelined else 1)

    def run() -> Any:
        accumulation = Accumulation(flat, op, comm.size)
        work = accumulation.x if accumulation.widened else flat.copy()
        layouts = blocks(len(work), program.regions[0], 1 if pipelined else choice.segments)
        comm.execute(program, [[Region(work, layout)] for layout in layouts], text, accumulation.reducer)
        if target is None:
            return None
        accumulation.finish(work, target.flat)
        return target.deliver()

    return Operation(text, run)
