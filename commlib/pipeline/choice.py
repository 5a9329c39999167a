"""Choice: agree on one schedule and one split of a model on all ranks, from options or from measured layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from commlib.arguments import suggest
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib.literals import BatchNormMode
from commlib.pipeline.pipe import AnySchedule, resolve
from commlib.pipeline.schedule import Schedule
from commlib.pipeline.schedule.auto import LayerCosts, choose
from commlib.pipeline.schedule.balance import balance

BATCH_NORMS: tuple[str, ...] = get_args(BatchNormMode)
"""The basis of the statistics that batch norm keeps for inference."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A schedule and the number of units in each of its stages.

    is_measured: the numbers come from measured times. why: the reason, if the schedule was chosen.
    """

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
) -> StageChoice:
    """Return the schedule, and the number of the model's units in each stage. Collective if units are measured.

    schedule, stages, every: as for `resolve`, or "auto": the fastest schedule with at most `memory` bytes of
    activations on a rank. split: "time", or a value that `count` converts to numbers, given the number of stages.
    measure: returns the costs of each unit; called on rank 0 only. Raises UsageError, on all ranks if it concerns the
    measurements.
    """
    if schedule == "auto":
        if stages is not None or every is not None:
            raise UsageError('pipeline: schedule="auto" chooses the number of stages: omit stages= and every=')
        choice = choose(_from_rank_0(comm, measure), comm.size, microbatches, memory=memory)
        return StageChoice(choice.best.schedule, choice.best.counts, is_measured=True, why=choice.why)
    if memory is not None:
        raise UsageError('pipeline: memory= is only for schedule="auto"')
    resolved = resolve(schedule, comm.size, microbatches, stages=stages, every=every)
    if isinstance(split, str) and split == "time":
        return StageChoice(resolved, balance(_from_rank_0(comm, measure).whole, resolved.stages), is_measured=True)
    return StageChoice(resolved, tuple(count(resolved.stages, split)))


def check_batch_norm(batch_norm: str) -> None:
    """Raise UsageError for an unknown value."""
    if batch_norm not in BATCH_NORMS:
        hint = suggest(batch_norm, BATCH_NORMS)
        raise UsageError(f"pipeline: batch_norm is {batch_norm!r}, expected one of {', '.join(BATCH_NORMS)}{hint}")


def check_example(example: Any) -> Any:
    """Return the example for measuring layers. Raises UsageError if it is None."""
    if example is None:
        raise UsageError(
            "pipeline: pass example= on rank 0, an x with the rows of one microbatch, to measure the layers"
        )
    return example


def _from_rank_0(comm: Communicator, measure: Callable[[], LayerCosts]) -> LayerCosts:
    """Return rank 0's measurements on all ranks; other ranks would measure other times. Collective."""
    raised: Exception | None = None
    costs: LayerCosts | str = ""
    if comm.rank == 0:
        try:
            costs = measure()
        except Exception as error:
            raised, costs = error, f"{type(error).__name__}: {error}"
    received: LayerCosts | str = comm.broadcast_object(costs)
    if raised is not None:
        raise raised
    if isinstance(received, str):
        raise UsageError(f"pipeline: rank 0 could not measure the model's layers: {received}")
    return received
