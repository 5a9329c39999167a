"""Zero bubble: compute weight gradients, for which no rank waits, in times that would be idle."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import place_folded, plan


@plan("zb_h1")
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with split backwards: rank r delays each W by r microbatches.

    Idle for (p - 1)(F + I - W) with p ranks: a third of 1F1B's idle time if F, I and W are equal. Holds at most p
    activations, like rank 0 in 1F1B.
    Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (ZB-H1), figure 3.
    """
    ahead = min(microbatches, ranks - rank)
    for microbatch in range(ahead):
        yield Action(rank, Kind.F, microbatch)
    for microbatch in range(microbatches):
        yield Action(rank, Kind.I, microbatch)
        if microbatch >= rank:
            yield Action(rank, Kind.W, microbatch - rank)
        if microbatch + ahead < microbatches:
            yield Action(rank, Kind.F, microbatch + ahead)
    for microbatch in range(max(0, microbatches - rank), microbatches):
        yield Action(rank, Kind.W, microbatch)


@plan("zb_v", chunks=2, place=place_folded, enough=lambda ranks, microbatches: max(microbatches, 2 * ranks - 1))
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Two stages on each rank, placed as a V, with split backwards: the first and last stage share a rank.

    Idle for (p - 1)F or less if F, I and W are equal. Each rank holds at most 2p stage activations, each half as large
    as in 1F1B: the peak of rank 0 in 1F1B.
    Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (V-shape), and "Zero Bubble ...", 2023.
    """
    down, up = rank, 2 * ranks - 1 - rank
    done = dict.fromkeys([(stage, kind) for stage in (down, up) for kind in Kind], 0)

    def take(stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(stage, kind, done[stage, kind])
            done[stage, kind] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from take(down, Kind.F)
    for _ in range(rank):
        yield from take(up, Kind.F)
        yield from take(down, Kind.F)
    for _ in range(ranks - rank):
        yield from take(up, Kind.F, Kind.I, Kind.W)
    while done[up, Kind.F] < microbatches:
        if done[down, Kind.F] < microbatches:
            yield from take(down, Kind.F)
        yield from take(down, Kind.I, Kind.W)
        yield from take(up, Kind.F, Kind.I, Kind.W)
    for _ in range(rank):
        yield from take(down, Kind.I)
        yield from take(up, Kind.I)
    for _ in range(ranks - rank):
        yield from take(down, Kind.I, Kind.W)
    for stage in (up, down):
        while done[stage, Kind.W] < microbatches:
            yield from take(stage, Kind.W)
