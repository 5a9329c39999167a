"""Interleaved 1F1B: several stages on each rank in turn, for shorter warm-up and drain phases."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.pipeline.schedule.ir import Action, Kind
from commlib.pipeline.schedule.registry import plan


@plan("interleaved", chunks=2, enough=lambda ranks, microbatches: -(-microbatches // ranks) * ranks)
def interleaved(rank: int, ranks: int, microbatches: int, *, chunks: int) -> Iterator[Action]:
    """1F1B with v stages on each rank, which process p microbatches in turn.

    Idle for (p - 1)(F + B) / v if p divides the number of microbatches. Rank r holds at most
    2(p - r - 1) + (v - 1)p + 1 stage activations, each 1/v of a rank's.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021 (PTD-P), figure 4.
    """
    total = microbatches * chunks
    ahead = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)

    def action(kind: Kind, step: int) -> Action:
        lap, place = divmod(step, ranks)
        turn, chunk = divmod(lap, chunks)
        if kind is Kind.B:
            chunk = chunks - 1 - chunk
        return Action(chunk * ranks + rank, kind, turn * ranks + place)

    for step in range(ahead):
        yield action(Kind.F, step)
    for step in range(total):
        if step + ahead < total:
            yield action(Kind.F, step + ahead)
        yield action(Kind.B, step)
