"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import plan


@plan("gpipe")
def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards, the last microbatch first.

    Idle for (p - 1)(F + B) with p ranks. Every rank holds the activations of all microbatches.
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, figure 2.
    """
    for microbatch in range(microbatches):
        yield Action(rank, Kind.F, microbatch)
    for microbatch in reversed(range(microbatches)):
        yield Action(rank, Kind.B, microbatch)
