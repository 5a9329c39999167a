"""Slot exchange: a step of a hierarchical program on device arrays: what a rank publishes in its slot, and takes.

All numbers are elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from commlib.schedule.hierarchy import NodeStep, Run, Transfer, join
from commlib.schedule.rail_map import Buffer


@dataclass(frozen=True, slots=True)
class SlotExchange:
    """The part of one rank in a step.

    copies: (source, start, target, start, count) within the rank. published: (source, start, offset in the slot,
    count). taken: (giver's place, offset in its slot, target, start, count). combined: (offset in all slots, target,
    start, count). is_local: no rank of the node publishes anything.
    """

    copies: Sequence[tuple[Buffer, int, Buffer, int, int]]
    published: Sequence[tuple[Buffer, int, int, int]]
    taken: Sequence[tuple[int, int, Buffer, int, int]]
    combined: Sequence[tuple[int, Buffer, int, int]]
    is_local: bool


def plan_exchange(step: NodeStep, runs: Sequence[Run], ranks: Sequence[int], place: int) -> SlotExchange:
    """Return the part of the rank with this place. runs: of each transfer. ranks: of the node."""
    numbers = {rank: number for number, rank in enumerate(ranks)}
    offsets: dict[tuple[int, Buffer, int], int] = {}  # by giver's place, source and start: an element is published once
    ends = [0] * len(ranks)
    copies, published = defaultdict[tuple[Buffer, Buffer], list[Run]](list), defaultdict[Buffer, list[Run]](list)
    taken = defaultdict[tuple[int, Buffer], list[Run]](list)
    for each, (start, into, count) in zip(step.transfers, runs, strict=True):
        giver, taker = numbers[each.source.rank], numbers[each.target.rank]
        if _is_copy(step, each):
            if giver == place:
                copies[each.source.buffer, each.target.buffer].append((start, into, count))
            continue
        key = giver, each.source.buffer, start
        if key not in offsets:
            offsets[key] = ends[giver]
            ends[giver] += count
            if giver == place:
                published[each.source.buffer].append((start, offsets[key], count))
        if taker == place:
            taken[giver, each.target.buffer].append((offsets[key], into, count))
    received = [(giver, target, join(runs)) for (giver, target), runs in taken.items()]
    return SlotExchange(
        [(source, run[0], target, run[1], run[2]) for (source, target), runs in copies.items() for run in join(runs)],
        [(source, *run) for source, runs in published.items() for run in join(runs)],
        [(giver, run[0], target, *run[1:]) for giver, target, runs in received if not step.reduce for run in runs],
        [(run[0], target, *run[1:]) for giver, target, runs in received if step.reduce and not giver for run in runs],
        all(_is_copy(step, each) for each in step.transfers),
    )


def _is_copy(step: NodeStep, each: Transfer) -> bool:
    """Return whether a rank copies at once. What the rail delivers goes through the slot: it may be in host memory."""
    return each.source.rank == each.target.rank and not step.reduce and each.source.buffer != "incoming"
