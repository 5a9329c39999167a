"""Breadth-first: several stages on each rank; each runs all microbatches before the next stage."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import plan


@plan("breadth_first", chunks=2)
def breadth_first(rank: int, ranks: int, microbatches: int, *, chunks: int) -> Iterator[Action]:
    """All microbatches through a rank's first stage, then through its second; backwards likewise, last stage first.

    Idle for (p - 1)(F + B) / v with p microbatches or more. Every rank holds all activations. A stage's gradients are
    complete early, so their reduction over replicas overlaps with the other stages.
    Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, figure 4.
    """
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield Action(chunk * ranks + rank, Kind.F, microbatch)
    for chunk in reversed(range(chunks)):
        for microbatch in range(microbatches):
            yield Action(chunk * ranks + rank, Kind.B, microbatch)
