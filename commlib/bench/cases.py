"""Case: the arrays of one row on one rank, their contents before a call, and the expected contents after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from commlib.bench import numbers
from commlib.bench.verbs import VERBS, BenchVerb
from commlib.dtypes import NUMPY, Array

Allocate = Callable[[int, str], Array]


@dataclass(frozen=True, slots=True)
class Case:
    """One verb on fixed arrays.

    x: this rank's input, or None. out: this rank's output, or None; it may share (a part of) the memory of x.
    given, wanted: the data of x and out, as the periods of equal blocks.
    count: elements as counted by nccl-tests: of the buffer, or of one part of it.
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
    x: Array | None
    out: Array | None
    given: list[Array] | None
    wanted: list[Array] | None

    def fill(self) -> None:
        """Write this rank's input, and values into its output that are wrong everywhere."""
        if self.out is not None and self.wanted is not None:
            _write(self.out, [(period == 0).astype(period.dtype) for period in self.wanted])
        if self.x is not None and self.given is not None:
            _write(self.x, self.given)

    def wrong(self) -> int:
        """Return the number of wrong elements in this rank's result."""
        if self.out is None or self.wanted is None:
            return 0
        blocks = zip(np.split(self.out, len(self.wanted)), self.wanted, strict=True)
        return sum(_differing(block, period) for block, period in blocks)

    def clear(self) -> None:
        """Write zeros, which repeated combination in place does not change."""
        for array in (self.x, self.out):
            if array is not None:
                array[...] = 0

    def rewrite(self) -> None:
        """Rewrite this rank's input with zeros, as a training step writes gradients before each call."""
        if self.x is not None and self.given is not None:
            self.x[...] = 0


def _write(array: Array, periods: list[Array]) -> None:
    for block, period in zip(np.split(array, len(periods)), periods, strict=True):
        block[...] = np.resize(period, len(block))


def _differing(block: Array, period: Array) -> int:
    whole = len(block) // len(period) * len(period)
    rows, rest = block[:whole].reshape(-1, len(period)), block[whole:]
    return int(np.count_nonzero(rows != period)) + int(np.count_nonzero(rest != period[: len(rest)]))


def count_of(verb: BenchVerb, dtype: str, nbytes: int, size: int) -> int:
    """Return the number of elements (of the buffer, or of one part) that fit into `nbytes`; at least one."""
    elements = nbytes // NUMPY[dtype].itemsize
    return max(1, elements // size if verb.split else elements)


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
) -> Case:
    """Allocate the arrays of a row. Collective if `allocate(count, dtype)` is."""
    verb = VERBS[name]
    count = count_of(verb, dtype, nbytes, size)
    whole = count * size if verb.split else count
    lengths = {"whole": whole, "part": whole // size, "": 0}
    own = slice(rank * count, (rank + 1) * count)
    x: Array | None = None
    out: Array | None = None
    if name == "all_gather" and in_place:
        out = allocate(whole, dtype)
        x = out[own]
    elif name != "barrier":
        x = allocate(lengths[verb.gives], dtype)
        if not in_place:
            out = allocate(lengths[verb.gets], dtype)
        else:
            out = x[own] if verb.gets == "part" else x
    given, wanted = _data(verb, dtype, op, root, rank, size)
    if verb.giver == "root" and rank != root:
        given = None
        x = x if name == "broadcast" else None
    if verb.getter == "root" and rank != root:
        out = wanted = None
    total = 0 if name == "barrier" else whole * NUMPY[dtype].itemsize
    counted = 0 if name == "barrier" else count
    return Case(verb, dtype, op, root, in_place, rank, size, counted, total, x, out, given, wanted)


def _data(
    verb: BenchVerb, dtype: str, op: str, root: int, rank: int, size: int
) -> tuple[list[Array] | None, list[Array] | None]:
    """Return the periods of a rank's input and of its expected output, in equal blocks."""
    ranks = range(size)

    def moved(source: int, target: int = 0) -> Array:
        return numbers.exchange_input(dtype, source, target)

    if verb.name == "barrier":
        return None, None
    if verb.name == "reduce_scatter":
        given = [numbers.reduction_input(dtype, op, rank, size, block) for block in ranks]
        return given, [numbers.reduction_result(dtype, op, size, rank)]
    if verb.reduces:
        return [numbers.reduction_input(dtype, op, rank, size)], [numbers.reduction_result(dtype, op, size)]
    if verb.name == "all_to_all":
        return [moved(rank, target) for target in ranks], [moved(source, rank) for source in ranks]
    if verb.name == "scatter":
        return [moved(root, target) for target in ranks], [moved(root, rank)]
    if verb.name == "broadcast":
        return [moved(root)], [moved(root)]
    if verb.name == "send_recv":
        return [moved(rank)], [moved((rank - 1) % size)]
    return [moved(rank)], [moved(source) for source in ranks]  # all_gather, gather
