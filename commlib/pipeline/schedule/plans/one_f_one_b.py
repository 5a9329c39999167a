"""1F1B: each backward as early as possible, and a flush at the end of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import plan


def alternating(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield p - r forwards on rank r, then backwards and forwards in turn: at most p - r are in flight."""
    ahead = min(microbatches, ranks - rank)
    for microbatch in range(ahead):
        yield Action(rank, Kind.F, microbatch)
    for microbatch in range(microbatches):
        yield Action(rank, Kind.B, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(rank, Kind.F, microbatch + ahead)


@plan("1f1b")
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A warm-up, then a backward and a forward in turn, then the remaining backwards.

    Idle for (p - 1)(F + B) with p ranks, like GPipe. Rank r holds the activations of at most p - r microbatches.
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush).
    """
    yield from alternating(rank, ranks, microbatches)
