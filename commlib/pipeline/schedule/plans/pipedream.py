"""PipeDream: update weights while the pipeline runs, without a flush within a batch."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind, Weights
from commlib.pipeline.schedule.plans.one_f_one_b import alternating
from commlib.pipeline.schedule.registry import plan


def _updating(rank: int, ranks: int, microbatches: int, every: int) -> Iterator[Action]:
    done = 0
    for action in alternating(rank, ranks, microbatches):
        yield action
        if action.kind is Kind.B:
            done += 1
            if done % every == 0 or done == microbatches:
                yield Action(rank, Kind.STEP)


@plan("pipedream", weights=Weights.NEWEST)
def pipedream(rank: int, ranks: int, microbatches: int, *, every: int = 1) -> Iterator[Action]:
    """1F1B with an update after each backward: no flush. A forward uses the newest weights of its stage.

    Idle only at the ends of a batch. Rank r keeps p - r versions of its weights: a backward uses its forward's.
    Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018; Narayanan et al., 2019.
    """
    yield from _updating(rank, ranks, microbatches, every)


@plan("pipedream_2bw", weights=Weights.PREVIOUS)
def pipedream_2bw(rank: int, ranks: int, microbatches: int, *, every: int) -> Iterator[Action]:
    """1F1B with an update after every p microbatches or more. All stages use the weights before the last update.

    Idle only at the ends of a batch. Two versions of the weights; W(t+1) = W(t) - f(gradient at W(t-1)) everywhere.
    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-2BW).
    """
    yield from _updating(rank, ranks, microbatches, every)
