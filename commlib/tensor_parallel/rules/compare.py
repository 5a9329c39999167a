"""Compare: hold the trace of a divided model against that of the whole one, step by step. [pure]"""

from __future__ import annotations

from commlib.tensor_parallel.equations import UNKNOWN_LENGTH, Shape
from commlib.tensor_parallel.rules.broken import PlanError
from commlib.tensor_parallel.rules.check import Checked
from commlib.tensor_parallel.states import State
from commlib.tensor_parallel.trace import Trace


def compare(whole: Trace, local: Trace, checked: Checked) -> bool:
    """Compare the shapes of a divided model's values with those of the whole one, for the same input.

    This finds models that give a number of heads, or of features, where a rank has some of them. Returns whether the
    two could be compared: they cannot where the steps differ. Raises PlanError for the first shape that is wrong.
    """
    kinds = [[(step.layer, step.kind, len(step.outputs)) for step in trace.steps] for trace in (whole, local)]
    if kinds[0] != kinds[1]:
        return False
    for step, own in zip(whole.steps, local.steps, strict=True):
        if step.kind == "constant":
            continue  # of zeros made like a part, say
        for value, part in zip(step.outputs, own.outputs, strict=True):
            state = checked.states[value]
            expected, came = whole.shapes.get(value, ()), local.shapes.get(part, ())
            if state.name in ("whole", "features", "sequence") and not _fits(state, expected, came):
                said = f"its result is {list(expected)} in the whole, {state}, and {list(came)} on this rank"
                todo = "let the model's reshapes say -1, or ask a tensor for its length, where they give a number"
                raise PlanError(own, "shape", said, todo, state)
    return True


def _fits(state: State, expected: Shape, came: Shape) -> bool:
    if len(expected) != len(came):
        return False
    return all(
        length == UNKNOWN_LENGTH
        or part == UNKNOWN_LENGTH
        or (part <= length if state.is_divided and dim in (state.dim, state.inner or state.dim) else part == length)
        for dim, (length, part) in enumerate(zip(expected, came, strict=True))
    )
