"""Own stages: build this rank's stages of a split model, and describe all stages for comparison among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.errors import UsageError
from commlib.pipeline.schedule import Kind, Schedule
from commlib_tensorflow.pipelines._batch_statistics import WholeBatchStatistics
from commlib_tensorflow.pipelines._compile_settings import options_of_layers
from commlib_tensorflow.pipelines._parts import SplitModel
from commlib_tensorflow.pipelines._recompute import LayerRecompute
from commlib_tensorflow.pipelines._stages import TensorflowStage
from commlib_tensorflow.pipelines._tied_weights import TiedWeights
from commlib_tensorflow.pipelines._variable_values import VariableValues


def stages_of(
    pieces: SplitModel,
    schedule: Schedule,
    rank: int,
    *,
    checkpoint: str | Sequence[LayerRecompute],
    values: VariableValues,
    statistics: WholeBatchStatistics | None,
    checks_rows: bool,
) -> dict[int, TensorflowStage]:
    """Return the stages of a rank, by number. Their arguments: see `TensorflowStage`."""
    splits = any(action.kind is Kind.I for program in schedule.programs for action in program)
    again = splits or (isinstance(checkpoint, str) and checkpoint != "none")
    layers_again = () if isinstance(checkpoint, str) or again else checkpoint
    stages: dict[int, TensorflowStage] = {}
    for number in schedule.stages_of(rank):
        own = {id(layer) for layer in pieces.parts[number]._flatten_layers()}
        is_last = number == schedule.stages - 1
        stages[number] = TensorflowStage(
            number,
            pieces.parts[number],
            {link.source: names for link, names in pieces.values.items() if link.target == number},
            {link.target: names for link, names in pieces.values.items() if link.source == number},
            outputs=pieces.outputs if is_last else (),
            masks=pieces.masks if is_last else (),
            values=values,
            again=again,
            layers_again=[one for one in layers_again if id(one.layer) in own],
            keeps_products=checkpoint == "selective",
            statistics=statistics,
            versions=bool(schedule.every),
            checks_rows=checks_rows,
        )
    return stages


def lines_of(parts: Sequence[Any]) -> list[str]:
    """Describe the variables and layers of all stages, for comparison."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        lines += [f"stage {number}: {_describe(variable)}" for variable in part.variables]
        lines += options_of_layers(number, part)
    return lines


def check_updates(schedule: Schedule, tied: TiedWeights) -> None:
    """Raise UsageError for models that a schedule with separate updates of each stage cannot train."""
    if schedule.every and (tied.exist or schedule.stages > schedule.ranks):
        what = "layers that stages on several ranks share" if tied.exist else "several stages on a rank"
        raise UsageError(f"pipeline: schedule {schedule.name} updates stages one by one and takes no {what}")


def _describe(variable: Any) -> str:
    """Describe a variable without the numbers in its name: Keras counts the objects that a process has made."""
    return f"{variable.name.rstrip('0123456789')} {tuple(variable.shape)} {variable.dtype}"
