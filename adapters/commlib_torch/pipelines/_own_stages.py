"""Own stages: build this rank's stages of a split model, and describe all stages for comparison among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.pipeline.recompute import Recompute
from commlib.pipeline.schedule import Schedule
from commlib_torch.pipelines._loss_module import UsedParameters
from commlib_torch.pipelines._losses import LossWeights
from commlib_torch.pipelines._parts import SplitModel
from commlib_torch.pipelines._row_check import RowCheck
from commlib_torch.pipelines._stages import StashedWeights, TorchStage

MakeOptimizer = Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""Makes the optimizer of named parameters, for schedules that update weights themselves."""


def stages_of(
    pieces: SplitModel, own: Sequence[int], *, losses: LossWeights, recompute: Recompute
) -> dict[int, TorchStage]:
    """Return some stages of a split model, by number."""
    stages: dict[int, TorchStage] = {}
    last = len(pieces.parts) - 1
    for stage in own:
        takes = {link.source: names for link, names in pieces.values.items() if link.target == stage}
        gives = {link.target: names for link, names in pieces.values.items() if link.source == stage}
        stages[stage] = TorchStage(
            pieces.parts[stage], takes, gives,
            is_first=stage == 0, is_last=stage == last, loss=losses, recompute=recompute,
            look=RowCheck(stage, pieces.parts[stage], where=losses.rows.x, checks=losses.weigher.checks_rows),
        )  # fmt: skip
    return stages


def lines_of(parts: Sequence[nn.Module], *, is_outline: bool) -> list[str]:
    """Describe the weights of all stages, for comparison. is_outline: only this rank's stages have memory."""
    return [
        f"stage {stage}: {name} {tuple(p.shape)} {p.dtype}{' on meta' if p.is_meta and not is_outline else ''}"
        for stage, part in enumerate(parts)
        for name, p in part.named_parameters()
    ]


def names_by_name(parts: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Map each name of a parameter to all its names in any stage."""
    names: dict[int, dict[str, None]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), {})[name] = None
    return {name: list(own) for own in names.values() for name in own}


def order_shared(stages: Mapping[int, TorchStage], last_gradients: Mapping[int, int]) -> None:
    """Order the stages of this rank that share weights: gradients are complete after the last of them.

    last_gradients: the order in which the runner completes the gradients of each stage.
    """
    seen: set[int] = set()
    for stage in sorted(stages, key=lambda number: last_gradients.get(number, -1), reverse=True):
        own = {id(parameter) for parameter in stages[stage].part.parameters()}
        stages[stage].later = frozenset(own & seen)
        seen |= own


def look_at_weights(
    stages: Mapping[int, TorchStage], own: Callable[[], Iterable[Tensor]], parts: Sequence[nn.Module], rank: int
) -> None:
    """Let stages check once which weights they and the loss use. own: returns the weights of this rank."""
    all_of = {name: weight for part in parts for name, weight in part.named_parameters()}
    for number, stage in stages.items():
        stage.used = UsedParameters(number, own, all_of, rank)


def give_optimizers(stages: Mapping[int, TorchStage], schedule: Schedule, make: MakeOptimizer | None) -> None:
    """Give stages their optimizers, if the schedule updates weights. Raises UsageError for one missing or unneeded."""
    if not schedule.every:
        if make is not None:
            raise UsageError(f"pipeline: schedule {schedule.name} leaves updates to you: do not pass optimizer=")
        return
    if make is None:
        raise UsageError(
            f"pipeline: schedule {schedule.name} updates weights while it runs: pass optimizer=, a function from "
            "named parameters to an optimizer, such as lambda named: torch.optim.SGD([p for _, p in named])"
        )
    for stage in stages.values():
        if named := list(stage.part.named_parameters()):
            stage.weights = StashedWeights(stage.part, make(named))


def check_updates(schedule: Schedule, *, loss_has_parameters: bool, shares_weights: bool) -> None:
    """Raise UsageError for models that a schedule with separate updates of each stage cannot train."""
    if schedule.every and loss_has_parameters:
        raise UsageError(
            f"pipeline: the loss has parameters, but schedule {schedule.name} updates each stage separately: use "
            "another schedule"
        )
    if schedule.every and shares_weights:
        raise UsageError(
            f"pipeline: stages on several ranks share a weight, but schedule {schedule.name} updates each stage "
            "separately, before the gradients of all ranks arrive: use another schedule"
        )
