"""Choice: come to one schedule and one split of a model on all ranks, from what a user says or from measured layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.pipeline.pipe import AnySchedule, resolve
from commlib.pipeline.schedule import Schedule
from commlib.pipeline.schedule.auto import LayerCosts, choose
from commlib.pipeline.schedule.balance import balance

BATCH_NORMS = ("microbatch", "batch")
"""Of what the statistics are that batch norm keeps for inference."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A schedule, how many units each of its stages has, if that is by measured time, and why, if it was chosen."""

    schedule: Schedule
    counts: tuple[int, ...]
    is_measured: bool = False
    why: str = ""


def choose_stages(
    comm: Communicator,
    schedule: AnySchedule,
    microbatches: int,
    *,
    split: Any,
    stages: int | None,
    every: int | None,
    memory: int | None,
    measure: Callable[[], LayerCosts],
    count: Callable[[int, Any], Sequence[int]],
) -> Chosen:
    """Return the schedule, and how many of a model's units each stage has. Collective where units are measured.

    schedule, stages, every: as `resolve` takes them, or "auto": the fastest that holds at most `memory` bytes of
    activations on a rank. split: "time", or what `count` turns into numbers, given the stages. measure: what each unit
    costs; called on rank 0 alone. Raises UsageError, on all ranks if it is about what was measured.
    """
    if schedule == "auto":
        if stages is not None or every is not None:
            raise UsageError('pipeline: schedule="auto" finds how many stages are best: leave out stages= and every=')
        choice = choose(_from_rank_0(comm, measure), comm.size, microbatches, memory=memory)
        return Chosen(choice.best.schedule, choice.best.counts, is_measured=True, why=choice.why)
    if memory is not None:
        raise UsageError('pipeline: memory= is a limit for schedule="auto"')
    found = resolve(schedule, comm.size, microbatches, stages=stages, every=every)
    if isinstance(split, str) and split == "time":
        return Chosen(found, balance(_from_rank_0(comm, measure).whole, found.stages), is_measured=True)
    return Chosen(found, tuple(count(found.stages, split)))


def check_batch_norm(batch_norm: str) -> None:
    """Raise UsageError for a word that says nothing."""
    if batch_norm not in BATCH_NORMS:
        raise UsageError(f"pipeline: batch_norm is {batch_norm!r}, expected one of {', '.join(BATCH_NORMS)}")


def check_example(example: Any) -> Any:
    """Return what layers are measured with. Raises UsageError if it is None."""
    if example is None:
        raise UsageError(
            "pipeline: give example= on rank 0: an x of as many rows as a microbatch has, to measure layers with"
        )
    return example


def _from_rank_0(comm: Communicator, measure: Callable[[], LayerCosts]) -> LayerCosts:
    """Return what rank 0 measures, on all ranks; others' clocks would say other times. Collective."""
    raised: Exception | None = None
    found: LayerCosts | str = ""
    if comm.rank == 0:
        try:
            found = measure()
        except Exception as error:
            raised, found = error, f"{type(error).__name__}: {error}"
    told: LayerCosts | str = comm.broadcast_object(found)
    if raised is not None:
        raise raised
    if isinstance(told, str):
        raise UsageError(f"pipeline: rank 0 could not measure the model's layers: {told}")
    return told
