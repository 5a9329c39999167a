"""Zero bubble: what nobody waits for, the weights' gradients, is done while there is nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import folded, plan


@plan("zb_h1")
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with split backwards: rank r does W as many microbatches later as there are ranks before it.

    Idle for (p - 1)(F + I - W) of p ranks: a third of 1F1B's if all three take as long. Holds p activations at most,
    as rank 0 does in 1F1B.
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


@plan("zb_v", chunks=2, place=folded, enough=lambda ranks, microbatches: max(microbatches, 2 * ranks - 1))
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Two stages on each rank, placed as a V, with split backwards: the last stage is where the first one is.

    Idle for (p - 1)F or less if F, I and W take as long. Rank r holds 2p activations of stages at most, each half of
    1F1B's: the peak of 1F1B's rank 0, on all ranks.
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
