"""Node exchanges: a step of a hierarchical program on host arrays, as exchanges on the board and local copies."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from commlib.node.collective import NOTHING, Exchange, Range
from commlib.schedule.hierarchy import NodeStep, Run, join
from commlib.schedule.rail_map import Buffer

Pairs = dict[tuple[int, int], list[Run]]
"""What ranks of a node, by place, give each other: (giver, taker) and the runs, in bytes."""

_EMPTY: Run = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Copies from one array of this rank to another, or within one."""

    runs: Sequence[Run]

    def run_at(self, source: int, target: int) -> None:
        """Copy between the arrays at these addresses."""
        for start, place, nbytes in self.runs:
            ctypes.memmove(target + place, source + start, nbytes)


def group_transfers(
    step: NodeStep, runs: Sequence[Run], ranks: Sequence[int], names: Mapping[Buffer, Buffer]
) -> dict[tuple[Buffer, Buffer], Pairs]:
    """Return the transfers of a step by the arrays that they read and write, without those that change nothing.

    runs: of each transfer, in bytes. ranks: of the node. names: the array of a buffer that has no array of its own.
    """
    groups: dict[tuple[Buffer, Buffer], Pairs] = {}
    numbers = {rank: number for number, rank in enumerate(ranks)}
    for each, run in zip(step.transfers, runs, strict=True):
        pair = numbers[each.source.rank], numbers[each.target.rank]
        source, target = each.source.buffer, each.target.buffer
        arrays = names.get(source, source), names.get(target, target)
        if step.reduce or pair[0] != pair[1] or arrays[0] != arrays[1] or run[0] != run[1]:
            groups.setdefault(arrays, {}).setdefault(pair, []).append(run)
    return {arrays: {pair: join(runs) for pair, runs in pairs.items()} for arrays, pairs in groups.items()}


def make_exchanges(pairs: Pairs, place: int, size: int, *, reduce: bool, nbytes: int | None) -> list[Exchange]:
    """Return the exchanges of the rank with this place, the same number on all `size` ranks of the node.

    In an exchange a rank takes one run from each other one. nbytes: of an array that may be in symmetric memory.
    """
    layers = zip_longest(*pairs.values(), fillvalue=_EMPTY)
    return [_exchange(dict(zip(pairs, layer, strict=True)), place, size, reduce, nbytes) for layer in layers]


def _exchange(runs: Mapping[tuple[int, int], Run], place: int, size: int, reduce: bool, nbytes: int | None) -> Exchange:
    given: dict[int, list[Range]] = {}  # what each rank sends, without duplicates
    takers = Counter[int]()
    for (giver, _), (start, _, length) in runs.items():
        takers[giver] += length > 0
        if length and (start, length) not in given.setdefault(giver, []):
            given[giver].append((start, length))
    if all(len(parts) == 1 for parts in given.values()) and max(takers.values()) > 1:  # one part that all ranks read
        sends = given.get(place, [NOTHING])
    else:
        sends = [_range(runs, place, taker, 0) for taker in range(size)]
    takes = [_range(runs, giver, place, 1) for giver in range(size)]
    offsets = None if nbytes is None else [runs.get((giver, place), _EMPTY)[0] for giver in range(size)]
    if reduce:
        takes = [takes[place]] * size
    return Exchange(sends, takes, max(length for _, _, length in runs.values()), offsets, nbytes or 0)


def _range(runs: Mapping[tuple[int, int], Run], giver: int, taker: int, end: int) -> Range:
    run = runs.get((giver, taker), _EMPTY)
    return (run[end], run[2]) if run[2] else NOTHING


def copies_of(pairs: Pairs, place: int) -> LocalCopy:
    """Return the copies of the rank with this place."""
    return LocalCopy([run for run in pairs.get((place, place), ()) if run[2]])
