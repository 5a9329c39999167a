"""The verbs that move data without arithmetic: on a node's board, in a hierarchy, and by schedules."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.arguments import integer
from commlib.buffers.views import address_of, as_host, writable
from commlib.collectives import hierarchical as hierarchy
from commlib.dtypes import Array, numpy_dtype
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.operation import Operation, Result, describe, result, rows, source
from commlib.node.call import Exchange, NodeCollective, ranges
from commlib.schedule import find
from commlib.schedule.layout import blocks, cut, uneven

if TYPE_CHECKING:
    from commlib.group.group import Group


def broadcast(comm: Group, x: Any, root: int, algorithm: str) -> Operation:
    array = as_host(x, "broadcast")
    comm.check_root("broadcast", root)
    at_root = comm.rank == root
    if not at_root:
        writable(array, "broadcast", "x")
    contiguous = source(array, "broadcast")
    flat = contiguous.reshape(-1)
    target = Result(array, flat, x, staged=contiguous is not array and not at_root)
    if comm.takes_node_path("broadcast", algorithm):
        call = comm.node_calls.verb(
            ("broadcast", array.dtype, array.shape, root, algorithm),
            [0] * comm.size,
            (),
            lambda: NodeCollective.broadcast(
                comm,
                describe("broadcast", array.size, array.dtype, f"root={root}", f"algorithm={algorithm}"),
                array.nbytes,
                root,
            ),
        )
        return call.operation(flat, target)

    text = describe("broadcast", array.size, array.dtype, f"root={root}", f"algorithm={algorithm}")
    if comm.takes_hierarchy("broadcast", algorithm):

        def run_in_hierarchy() -> Any:
            hierarchy.broadcast(comm, flat, root, text)
            return target.deliver()

        return Operation(text, run_in_hierarchy)

    choice = comm.choose("broadcast", algorithm, comm.size, array.nbytes)
    pipelined = find("broadcast", choice.algorithm).segmented
    program = comm.programs("broadcast", choice.algorithm, root=root, segments=choice.segments if pipelined else 1)
    layouts = blocks(len(flat), program.regions[0], 1 if pipelined else choice.segments)

    def run() -> Any:
        comm.execute(program, [[Region(flat, layout)] for layout in layouts], text)
        return target.deliver()

    return Operation(text, run)


def _stacked(size: int, array: Array) -> tuple[int, ...]:
    """Return the shape of the arrays of all ranks, one after another."""
    return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)


def all_gather(comm: Group, x: Any, out: Any, algorithm: str) -> Operation:
    array = source(x, "all_gather")
    target = result(out, _stacked(comm.size, array), array.dtype, "all_gather")
    layout = uneven([array.size] * comm.size)
    flat = array.reshape(-1)
    start, stop = layout.slice_of(comm.rank)
    if np.may_share_memory(flat, target.flat) and address_of(flat) != address_of(target.flat[start:stop]):
        flat = flat.copy()  # it would be overwritten before all have read it
    if comm.takes_node_path("all_gather", algorithm):
        nbytes = array.nbytes
        in_place = address_of(flat) == address_of(target.flat[start:stop])  # each rank's lies in its own slice
        call = comm.node_calls.verb(
            ("all_gather", array.dtype, array.shape, algorithm, *["in place"] * in_place),
            [nbytes * rank * in_place for rank in range(comm.size)],
            target.array.shape,
            lambda: NodeCollective.exchange(
                comm,
                describe("all_gather", array.shape, array.dtype, f"algorithm={algorithm}"),
                Exchange([(0, nbytes)], ranges(layout, array.itemsize), nbytes),
            ),
        )
        return call.operation(target.flat, target, own=flat) if in_place else call.operation(flat, target)

    text = describe("all_gather", array.shape, array.dtype, f"algorithm={algorithm}")
    if comm.takes_hierarchy("all_gather", algorithm):

        def run_in_hierarchy() -> Any:
            hierarchy.all_gather(comm, flat, target.flat, text)
            return target.deliver()

        return Operation(text, run_in_hierarchy)

    choice = comm.choose("all_gather", algorithm, comm.size, array.nbytes * comm.size)
    program = comm.programs("all_gather", choice.algorithm)
    layouts = cut(layout, choice.segments if program.sends_single_chunks else 1)

    def run() -> Any:
        target.flat[start:stop] = flat
        comm.execute(program, [[Region(target.flat, piece)] for piece in layouts], text)
        return target.deliver()

    return Operation(text, run)


def all_gather_v(comm: Group, x: Any) -> Operation:
    array = source(x, "all_gather_v")
    length, row = rows(array, "all_gather_v")
    text = describe("all_gather_v", array[:0].shape, array.dtype)  # the length of dimension 0 may differ
    counting = all_gather(comm, np.array([length], np.int64), None, "auto")

    def run() -> Any:
        lengths = counting.run()
        layout = uneven(int(n) * row for n in lengths)
        gathered = np.empty((int(lengths.sum()), *array.shape[1:]), array.dtype)
        flat = gathered.reshape(-1)
        if comm.on_board:
            nbytes = array.nbytes
            longest = max(layout.counts) * array.itemsize
            exchange = Exchange([(0, nbytes)], ranges(layout, array.itemsize), longest)
            comm.exchange(text, exchange, address_of(array), address_of(flat))
            return gathered
        start, stop = layout.slice_of(comm.rank)
        flat[start:stop] = array.reshape(-1)
        comm.execute(comm.programs("all_gather", "ring"), [[Region(flat, layout)]], text, part=1)
        return gathered

    return Operation(text, run)


def gather(comm: Group, x: Any, root: int, out: Any, algorithm: str) -> Operation:
    array = source(x, "gather")
    comm.check_root("gather", root)
    at_root = comm.rank == root
    target = result(out, _stacked(comm.size, array), array.dtype, "gather") if at_root else None
    layout = uneven([array.size] * comm.size)
    flat = array.reshape(-1)
    if target is not None and np.may_share_memory(flat, target.flat):
        flat = flat.copy()
    if comm.takes_node_path("gather", algorithm):
        nbytes = array.nbytes
        call = comm.node_calls.verb(
            ("gather", array.dtype, array.shape, root, algorithm),
            [0] * comm.size,
            _stacked(comm.size, array),
            lambda: NodeCollective.exchange(
                comm,
                describe("gather", array.shape, array.dtype, f"root={root}", f"algorithm={algorithm}"),
                Exchange([(0, nbytes)], ranges(layout, array.itemsize) if at_root else [(0, 0)] * comm.size, nbytes),
            ),
        )
        return call.operation(flat, target)

    text = describe("gather", array.shape, array.dtype, f"root={root}", f"algorithm={algorithm}")
    program = comm.programs("gather", "binomial_tree" if algorithm == "auto" else algorithm, root=root)

    def run() -> Any:
        whole = target.flat if target is not None else np.empty(layout.count, array.dtype)
        start, stop = layout.slice_of(comm.rank)
        whole[start:stop] = flat
        comm.execute(program, [[Region(whole, layout)]], text)
        return target.deliver() if target is not None else None

    return Operation(text, run)


def scatter(comm: Group, x: Any, root: int, out: Any, algorithm: str) -> Operation:
    comm.check_root("scatter", root)
    on_node = comm.takes_node_path("scatter", algorithm)
    array = None
    if comm.rank == root:
        array = source(x, "scatter")
        length, _ = rows(array, "scatter")
        if length % comm.size:
            raise UsageError(
                f"scatter: dimension 0 of x has length {length}, which {comm.size} ranks cannot share evenly"
            )
    name = "binomial_tree" if algorithm in ("auto", "node") else algorithm
    program = comm.programs("scatter", name, root=root)
    text = f"scatter, root={root}, algorithm={algorithm}"

    def run() -> Any:
        # Only the root knows what it scatters, so that the others need not pass an array.
        meta = pickle.dumps((array.shape, array.dtype.name) if array is not None else None)
        whole, dtype_name = pickle.loads(comm.exchange_bytes(meta, root, text))
        shape, dtype = (whole[0] // comm.size, *whole[1:]), numpy_dtype(dtype_name)
        try:
            target, refused = result(out, shape, dtype, "scatter"), None
        except UsageError as error:  # the others do not know: take part, then say so
            target, refused = result(None, shape, dtype, "scatter"), error
        layout = uneven([target.flat.size] * comm.size)
        flat = array.reshape(-1) if array is not None else None
        if on_node:
            nbytes = target.flat.nbytes
            sends = ranges(layout, dtype.itemsize) if flat is not None else [(0, 0)] * comm.size
            takes = [(0, nbytes if rank == root else 0) for rank in range(comm.size)]
            origin = apart_from(flat, target.flat) if flat is not None else target.flat
            comm.exchange(text, Exchange(sends, takes, nbytes), address_of(origin), address_of(target.flat))
        else:
            if flat is None:
                flat = np.empty(layout.count, dtype)
            comm.execute(program, [[Region(flat, layout)]], text, part=2)
            start, stop = layout.slice_of(comm.rank)
            target.flat[...] = flat[start:stop]
        return target, refused

    def finish(answer: tuple[Result, UsageError | None]) -> Any:
        target, refused = answer
        if refused is not None:
            raise refused
        return target.deliver()

    return Operation(text, run, finish=finish)


def apart_from(x: Array, target: Array) -> Array:
    """Return `x`, or a copy of it if it shares memory with `target`."""
    return x.copy() if np.may_share_memory(x, target) else x


def all_to_all(comm: Group, x: Any, out: Any, algorithm: str) -> Operation:
    array = source(x, "all_to_all")
    length, _ = rows(array, "all_to_all")
    if length % comm.size:
        raise UsageError(
            f"all_to_all: dimension 0 of x has length {length}, which is not a multiple of {comm.size} ranks; "
            "use all_to_all_v for uneven parts"
        )
    target = result(out, array.shape, array.dtype, "all_to_all")
    chunk = array.size // comm.size
    layout = uneven([chunk] * comm.size)
    flat = apart_from(array.reshape(-1), target.flat)  # every chunk may be overwritten before it has been sent
    if comm.takes_node_path("all_to_all", algorithm):
        nbytes = chunk * array.itemsize
        call = comm.node_calls.verb(
            ("all_to_all", array.dtype, array.shape, algorithm),
            [comm.rank * nbytes] * comm.size,
            array.shape,
            lambda: NodeCollective.exchange(
                comm,
                describe("all_to_all", array.shape, array.dtype, f"algorithm={algorithm}"),
                Exchange(ranges(layout, array.itemsize), ranges(layout, array.itemsize), nbytes),
            ),
        )
        return call.operation(flat, target)

    text = describe("all_to_all", array.shape, array.dtype, f"algorithm={algorithm}")
    if comm.takes_hierarchy("all_to_all", algorithm):

        def run_in_hierarchy() -> Any:
            hierarchy.all_to_all(comm, flat, target.flat, text)
            return target.deliver()

        return Operation(text, run_in_hierarchy)

    choice = comm.choose("all_to_all", algorithm, comm.size, array.nbytes)
    program = comm.programs("all_to_all", choice.algorithm)
    pieces = choice.segments if program.sends_single_chunks else 1

    def run() -> Any:
        scratch = [np.empty(chunks * chunk, array.dtype) for chunks in program.regions[2:]]
        layouts = [cut(uneven([chunk] * chunks), pieces) for chunks in program.regions]
        arrays = [flat, target.flat, *scratch]
        regions = [
            [Region(array, layouts[number][piece]) for number, array in enumerate(arrays)] for piece in range(pieces)
        ]
        comm.execute(program, regions, text)
        return target.deliver()

    return Operation(text, run)


def all_to_all_v(comm: Group, x: Any, splits: Sequence[int]) -> Operation:
    array = source(x, "all_to_all_v")
    length, row = rows(array, "all_to_all_v")
    sending = [integer("all_to_all_v", "a split", n) for n in splits]
    if len(sending) != comm.size or min(sending) < 0 or sum(sending) != length:
        raise UsageError(
            f"all_to_all_v: splits {sending} must be {comm.size} lengths, none negative, "
            f"that add up to {length}, the length of dimension 0 of x"
        )
    text = describe("all_to_all_v", array[:0].shape, array.dtype)
    counts = np.array(sending, np.int64)
    # On a node all ranks learn all splits, because they must agree on the longest part.
    counting = all_gather(comm, counts, None, "auto") if comm.on_board else all_to_all(comm, counts, None, "auto")

    def run() -> Any:
        known = counting.run()
        received = known.reshape(comm.size, comm.size)[:, comm.rank].copy() if comm.on_board else known
        output = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
        into = uneven(int(n) * row for n in received)
        outof = uneven(n * row for n in sending)
        if comm.on_board:
            longest = int(known.max()) * row * array.itemsize
            exchange = Exchange(ranges(outof, array.itemsize), ranges(into, array.itemsize), longest)
            comm.exchange(text, exchange, address_of(array), address_of(output))
            return output, received
        regions = [Region(array.reshape(-1), outof), Region(output.reshape(-1), into)]
        comm.execute(comm.programs("all_to_all", "pairwise"), [regions], text, part=1)
        return output, received

    return Operation(text, run)
