"""Case: the arrays of one row on one rank, their contents before a call, and the expected contents after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commlib.bench import numbers
from commlib.bench.measure import HOST_TIMER, Call, Timer
from commlib.bench.memory import HOST, BenchMemory, Blocks
from commlib.bench.verbs import VERBS, BenchVerb
from commlib.dtypes import NUMPY, Array

Allocate = Callable[[int, str], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One verb on fixed arrays.

    x: this rank's input, or None. out: this rank's output, or None; it may share (a part of) the memory of x.
    given, wanted: the data of x and out. splits, takes: elements to and from each rank, of an all-to-all. parts:
    elements of each rank's part.
    count: elements as counted by nccl-tests: of the buffer, or of one part of it. memory: of x and out.
    """

    verb: BenchVerb
    dtype: str
    op: str
    root: int
    in_place: bool
    rank: int
    size: int
    count: int
    nbytes: int
    x: Any
    out: Any
    given: Blocks | None
    wanted: Blocks | None
    splits: list[int] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    memory: BenchMemory = HOST

    def fill(self) -> None:
        """Write this rank's input, and values into its output that are wrong everywhere."""
        if self.out is not None and self.wanted is not None:
            self.memory.write(self.out, [(length, (one == 0).astype(one.dtype)) for length, one in self.wanted])
        if self.x is not None and self.given is not None:
            self.memory.write(self.x, self.given)

    def wrong(self, returned: Any = None) -> int:
        """Return the number of wrong elements in this rank's result: `out`, or what a verb without one `returned`."""
        if self.out is None or self.wanted is None:
            return 0
        result = self.out if self.verb.has_out or returned is None else returned
        values, start, differing = self.memory.read(result), 0, 0
        length_wanted = sum(length for length, _ in self.wanted)
        if len(values) != length_wanted:
            return max(len(values), length_wanted)
        for length, period in self.wanted:
            differing += _differing(values[start : start + length], period)
            start += length
        return differing

    def clear(self) -> None:
        """Write zeros, which repeated combination in place does not change."""
        for array in (self.x, self.out):
            if array is not None:
                self.memory.clear(array)

    def rewrite(self) -> None:
        """Rewrite this rank's input with zeros, as a training step writes gradients before each call."""
        if self.x is not None and self.given is not None:
            self.memory.clear(self.x)


def wrong_elements(world: Any, case: Case, call: Call, timer: Timer = HOST_TIMER) -> int:
    """Return the number of wrong elements after one call, over all ranks. The data stays in the arrays."""
    case.fill()
    world.Barrier()  # peers must not overwrite a contender's writes while they still fill their arrays
    returned = call()
    timer.finish()
    return int(world.allreduce(case.wrong(returned)))


def _differing(block: Array, period: Array) -> int:
    whole = len(block) // len(period) * len(period)
    rows, rest = block[:whole].reshape(-1, len(period)), block[whole:]
    return int(np.count_nonzero(rows != period)) + int(np.count_nonzero(rest != period[: len(rest)]))


def count_of(verb: BenchVerb, dtype: str, nbytes: int, size: int) -> int:
    """Return the number of elements (of the buffer, or of one part) that fit into `nbytes`; at least one."""
    return verb.count(nbytes // NUMPY[dtype].itemsize, size)


def make(
    name: str,
    *,
    rank: int,
    size: int,
    allocate: Allocate,
    nbytes: int = 0,
    dtype: str = "float32",
    op: str = "sum",
    root: int = 0,
    in_place: bool = False,
    memory: BenchMemory = HOST,
) -> Case:
    """Allocate the arrays of a row. Collective if `allocate(count, dtype)`, which returns arrays of `memory`, is."""
    verb = VERBS[name]
    count = count_of(verb, dtype, nbytes, size)
    whole = count * verb.shares(size)
    parts = [verb.part_shares(each) * count for each in range(size)]
    lengths = {"whole": whole, "part": parts[rank], "": 0}

    def array(side: str) -> Any:
        if side == "part" and parts[0] != parts[-1]:  # uneven: symmetric memory has the same length on all ranks
            return memory.part(allocate(max(parts), dtype), 0, parts[rank])
        return allocate(lengths[side], dtype)

    x: Any = None
    out: Any = None
    if name == "all_gather" and in_place:
        out = allocate(whole, dtype)
        x = memory.part(out, rank * count, count)
    elif name != "barrier":
        x = array(verb.gives)
        if not in_place:
            out = array(verb.gets)
        else:
            out = memory.part(x, rank * count, count) if verb.gets == "part" else x
    splits = [_shares(verb, rank, to, size) * count for to in range(size)]
    takes = [_shares(verb, source, rank, size) * count for source in range(size)]
    given, wanted = _data(verb, dtype, op, root, rank, size)
    if verb.giver == "root" and rank != root:
        given = None
        x = x if name == "broadcast" else None
    if verb.getter == "root" and rank != root:
        out = wanted = None
    if verb.getter == "later" and rank == 0:
        wanted = None
    total = 0 if name == "barrier" else whole * NUMPY[dtype].itemsize
    return Case(
        verb=verb,
        dtype=dtype,
        op=op,
        root=root,
        in_place=in_place,
        rank=rank,
        size=size,
        count=0 if name == "barrier" else count,
        nbytes=total,
        x=x,
        out=out,
        given=_blocks(given, splits, parts, lengths[verb.gives]),
        wanted=_blocks(wanted, takes, parts, lengths[verb.gets]),
        splits=splits,
        takes=takes,
        parts=parts,
        memory=memory,
    )


def _shares(verb: BenchVerb, source: int, target: int, size: int) -> int:
    """Return the number of shares that rank `source` sends to rank `target` in an all-to-all, 0 in other verbs."""
    if verb.name == "all_to_all_v":
        return 1 + (source + target) % size
    return int(verb.name == "all_to_all")


def _blocks(periods: list[Array] | None, messages: list[int], parts: list[int], whole: int) -> Blocks | None:
    """Return the blocks of an array: the messages of an all-to-all, else one block, or one for each rank's part."""
    if periods is None:
        return None
    lengths = messages if any(messages) else parts if len(periods) == len(parts) else [whole]
    return list(zip(lengths, periods, strict=True))


def _data(
    verb: BenchVerb, dtype: str, op: str, root: int, rank: int, size: int
) -> tuple[list[Array] | None, list[Array] | None]:
    """Return the periods of the blocks of a rank's input, and of its expected output."""
    ranks = range(size)

    def moved(source: int, target: int = 0) -> Array:
        return numbers.exchange_input(dtype, source, target)

    if verb.name == "barrier":
        return None, None
    if verb.name in ("reduce_scatter", "reduce_scatter_v"):
        given = [numbers.reduction_input(dtype, op, rank, size, block) for block in ranks]
        return given, [numbers.reduction_result(dtype, op, size, rank)]
    if verb.name in ("scan", "exscan"):
        first = max(1, rank + (verb.name == "scan"))  # rank 0 gets no result of an exscan
        return [numbers.reduction_input(dtype, op, rank, size)], [
            numbers.reduction_result(dtype, op, size, first=first)
        ]
    if verb.reduces:
        return [numbers.reduction_input(dtype, op, rank, size)], [numbers.reduction_result(dtype, op, size)]
    if verb.name in ("all_to_all", "all_to_all_v"):
        return [moved(rank, target) for target in ranks], [moved(source, rank) for source in ranks]
    if verb.name == "scatter":
        return [moved(root, target) for target in ranks], [moved(root, rank)]
    if verb.name == "broadcast":
        return [moved(root)], [moved(root)]
    if verb.name == "send_recv":
        return [moved(rank)], [moved((rank - 1) % size)]
    return [moved(rank)], [moved(source) for source in ranks]  # all_gather, all_gather_v, gather
