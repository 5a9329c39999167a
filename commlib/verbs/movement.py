"""The verbs that move data without arithmetic, by schedules."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import as_host, writable
from commlib.dtypes import numpy_dtype
from commlib.errors import UsageError
from commlib.executor import Region
from commlib.schedule.layout import even, uneven
from commlib.verbs.operation import Operation, describe, result, rows, source
from commlib.verbs.reduction import pipeline_segments

if TYPE_CHECKING:
    from commlib.group import Group

_SMALL = 16 << 10
_LARGE = 256 << 10


def broadcast(comm: Group, x: Any, root: int, algorithm: str) -> Operation:
    array = as_host(x, "broadcast")
    comm.check_root("broadcast", root)
    at_root = comm.rank == root
    if not at_root:
        writable(array, "broadcast", "x")
    staged = source(array, "broadcast") if at_root else result(array, array.shape, array.dtype, "broadcast").flat
    flat = staged.reshape(-1)
    name, segments = algorithm, 1
    if algorithm == "auto":
        name = "binomial_tree" if array.nbytes <= _LARGE else "chain"
    if name == "chain":
        segments = pipeline_segments(array.nbytes)
    programs = comm.programs("broadcast", name, root=root, segments=segments)

    def run() -> Any:
        comm.execute(programs, lambda chunks: [Region(flat, even(len(flat), chunks))], text)
        if not at_root and not np.may_share_memory(flat, array):
            array[...] = flat.reshape(array.shape)
        return x

    text = describe("broadcast", array, f"root={root}", f"algorithm={algorithm}")
    return Operation(text, run)


def all_gather(comm: Group, x: Any, out: Any, algorithm: str) -> Operation:
    array = source(x, "all_gather")
    shape = (comm.size * array.shape[0], *array.shape[1:]) if array.ndim else (comm.size,)
    target = result(out, shape, array.dtype, "all_gather")
    name = algorithm
    if algorithm == "auto":
        name = "bruck" if array.nbytes * comm.size <= _SMALL else "ring"
    programs = comm.programs("all_gather", name)
    layout = uneven([array.size] * comm.size)
    flat = array.reshape(-1)

    def run() -> Any:
        start, stop = layout.offsets[comm.rank : comm.rank + 2]
        target.flat[start:stop] = flat
        comm.execute(programs, lambda chunks: [Region(target.flat, layout)], text)
        return target.deliver()

    text = describe("all_gather", array, f"algorithm={algorithm}", shape=True)
    return Operation(text, run)


def all_gather_v(comm: Group, x: Any) -> Operation:
    array = source(x, "all_gather_v")
    length, row = rows(array, "all_gather_v")
    programs = comm.programs("all_gather", "ring")
    counting = comm.programs("all_gather", "bruck")

    def run() -> Any:
        lengths = np.zeros(comm.size, np.int64)
        lengths[comm.rank] = length
        comm.execute(counting, lambda chunks: [Region(lengths, even(comm.size, comm.size))], text)
        layout = uneven(int(n) * row for n in lengths)
        gathered = np.empty((int(lengths.sum()), *array.shape[1:]), array.dtype)
        flat = gathered.reshape(-1)
        start, stop = layout.offsets[comm.rank : comm.rank + 2]
        flat[start:stop] = array.reshape(-1)
        comm.execute(programs, lambda chunks: [Region(flat, layout)], text, part=1)
        return gathered

    text = describe("all_gather_v", array[:0], shape=True)  # the length of dimension 0 may differ
    return Operation(text, run)


def gather(comm: Group, x: Any, root: int, out: Any, algorithm: str) -> Operation:
    array = source(x, "gather")
    comm.check_root("gather", root)
    shape = (comm.size * array.shape[0], *array.shape[1:]) if array.ndim else (comm.size,)
    target = result(out, shape, array.dtype, "gather") if comm.rank == root else None
    programs = comm.programs("gather", "binomial_tree" if algorithm == "auto" else algorithm, root=root)
    layout = uneven([array.size] * comm.size)

    def run() -> Any:
        flat = target.flat if target is not None else np.empty(layout.count, array.dtype)
        start, stop = layout.offsets[comm.rank : comm.rank + 2]
        flat[start:stop] = array.reshape(-1)
        comm.execute(programs, lambda chunks: [Region(flat, layout)], text)
        return target.deliver() if target is not None else None

    text = describe("gather", array, f"root={root}", f"algorithm={algorithm}", shape=True)
    return Operation(text, run)


def scatter(comm: Group, x: Any, root: int, out: Any, algorithm: str) -> Operation:
    comm.check_root("scatter", root)
    array = None
    if comm.rank == root:
        array = source(x, "scatter")
        length, _ = rows(array, "scatter")
        if length % comm.size:
            raise UsageError(
                f"scatter: dimension 0 of x has length {length}, which {comm.size} ranks cannot share evenly"
            )
    programs = comm.programs("scatter", "binomial_tree" if algorithm == "auto" else algorithm, root=root)

    def run() -> Any:
        # Only the root knows what it scatters, so that the others need not pass an array.
        meta = pickle.dumps((array.shape, array.dtype.name) if array is not None else None)
        whole, name = pickle.loads(comm.exchange_bytes(meta, root, text))
        shape, dtype = (whole[0] // comm.size, *whole[1:]), numpy_dtype(name)
        try:
            target, refused = result(out, shape, dtype, "scatter"), None
        except UsageError as error:  # the others do not know: take part, then say so
            target, refused = result(None, shape, dtype, "scatter"), error
        layout = uneven([target.flat.size] * comm.size)
        flat = array.reshape(-1) if array is not None else np.empty(layout.count, dtype)
        comm.execute(programs, lambda chunks: [Region(flat, layout)], text, part=2)
        start, stop = layout.offsets[comm.rank : comm.rank + 2]
        target.flat[...] = flat[start:stop]
        if refused is not None:
            raise refused
        return target.deliver()

    text = f"scatter, root={root}, algorithm={algorithm}"
    return Operation(text, run)


def all_to_all(comm: Group, x: Any, out: Any, algorithm: str) -> Operation:
    array = source(x, "all_to_all")
    length, _ = rows(array, "all_to_all")
    if length % comm.size:
        raise UsageError(
            f"all_to_all: dimension 0 of x has length {length}, which is not a multiple of {comm.size} ranks; "
            "use all_to_all_v for uneven parts"
        )
    target = result(out, array.shape, array.dtype, "all_to_all")
    name = algorithm
    if algorithm == "auto":
        name = "bruck" if comm.size > 4 and array.nbytes // comm.size <= 256 else "pairwise"
    programs = comm.programs("all_to_all", name)
    flat = array.reshape(-1)
    if np.may_share_memory(flat, target.flat):
        flat = flat.copy()  # every chunk may be overwritten before it has been sent
    chunk = array.size // comm.size

    def run() -> Any:
        def regions(*chunks: int) -> list[Region]:
            scratch = [np.empty(n * chunk, array.dtype) for n in chunks[2:]]
            return [Region(a, uneven([chunk] * n)) for a, n in zip([flat, target.flat, *scratch], chunks, strict=True)]

        comm.execute(programs, regions, text)
        return target.deliver()

    text = describe("all_to_all", array, f"algorithm={algorithm}", shape=True)
    return Operation(text, run)


def all_to_all_v(comm: Group, x: Any, splits: Sequence[int]) -> Operation:
    array = source(x, "all_to_all_v")
    length, row = rows(array, "all_to_all_v")
    sending = [int(n) for n in splits]
    if len(sending) != comm.size or min(sending) < 0 or sum(sending) != length:
        raise UsageError(
            f"all_to_all_v: splits {sending} must be {comm.size} lengths, none negative, "
            f"that add up to {length}, the length of dimension 0 of x"
        )
    programs = comm.programs("all_to_all", "pairwise")

    def run() -> Any:
        ones = even(comm.size, comm.size)
        sent, received = np.array(sending, np.int64), np.empty(comm.size, np.int64)
        comm.execute(programs, lambda *chunks: [Region(sent, ones), Region(received, ones)], text)
        output = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
        into = uneven(int(n) * row for n in received)
        outof = uneven(n * row for n in sending)
        flat = array.reshape(-1)
        regions = [Region(flat, outof), Region(output.reshape(-1), into)]
        comm.execute(programs, lambda *chunks: regions, text, part=1)
        return output, received

    text = describe("all_to_all_v", array[:0], shape=True)
    return Operation(text, run)
