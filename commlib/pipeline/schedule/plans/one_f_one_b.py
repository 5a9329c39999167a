"""1F1B: a backward as soon as there is one, and a flush at the end of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import plan


def alternating(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Yield p - r forwards on rank r, then backwards and forwards in turn: no more than p - r are in flight."""
    ahead = min(microbatches, ranks - rank)
    for microbatch in range(ahead):
        yield Action(rank, Kind.F, microbatch)
    for microbatch in range(microbatches):
        yield Action(rank, Kind.B, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(rank, Kind.F, microbatch + ahead)


@plan("1f1b")
def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A warm-up, then a backward and a forward in turn, then the backwards that are left.

    Idle for (p - 1)(F + B) of p ranks, as GPipe. Rank r holds the activations of p - r microbatches at most.
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush).
    """
    yield from alternating(rank, ranks, microbatches)
