"""Trace comparison: compare the trace of a sharded model with the unsharded one, step by step. [pure]"""

from __future__ import annotations

from commlib.tensor_parallel.equations import UNKNOWN_LENGTH, Shape
from commlib.tensor_parallel.placements import Placement
from commlib.tensor_parallel.rules.check import CheckedPlan
from commlib.tensor_parallel.rules.plan_error import PlanError
from commlib.tensor_parallel.trace import ModelTrace


def compare(whole: ModelTrace, local: ModelTrace, checked: CheckedPlan) -> bool:
    """Compare the shapes of a sharded model's values with the unsharded model's, for the same input.

    This finds models that use the full number of heads, or of features, where a rank has fewer. Returns whether the
    traces could be compared, which needs the same steps. Raises PlanError for the first wrong shape.
    """
    kinds = [[(step.layer, step.kind, len(step.outputs)) for step in trace.steps] for trace in (whole, local)]
    if kinds[0] != kinds[1]:
        return False
    for step, own in zip(whole.steps, local.steps, strict=True):
        if step.kind == "constant":
            continue  # may be, e.g., zeros in the shape of a shard
        for value, part in zip(step.outputs, own.outputs, strict=True):
            state = checked.states[value]
            expected, actual = whole.shapes.get(value, ()), local.shapes.get(part, ())
            if state.name in ("whole", "features", "sequence") and not _fits(state, expected, actual):
                text = f"its result, {state}, has shape {list(expected)} unsharded, but {list(actual)} on this rank"
                todo = "use -1, or the length of a tensor, instead of a number in the model's reshapes"
                raise PlanError(own, "shape", text, todo, state)
    return True


def _fits(state: Placement, expected: Shape, actual: Shape) -> bool:
    if len(expected) != len(actual):
        return False
    return all(
        length == UNKNOWN_LENGTH
        or part == UNKNOWN_LENGTH
        or (part <= length if state.is_divided and dim in (state.dim, state.inner or state.dim) else part == length)
        for dim, (length, part) in enumerate(zip(expected, actual, strict=True))
    )
