"""Plan rules, and the error that names the broken rule. [pure]"""

from __future__ import annotations

from commlib.errors import UsageError
from commlib.tensor_parallel.placements import UNKNOWN, Placement
from commlib.tensor_parallel.trace import TraceStep

RULES = {
    "whole": "an unsharded layer takes all features of all rows",
    "column": "a Column takes an unsharded input",
    "row": "a Row takes an input that a Column has sharded",
    "sequence": "a layer that gathers a sequence takes an input sharded along it",
    "match": "sharded values combine only with values sharded the same way",
    "needs": "an operation that needs a full dimension takes no value sharded along it",
    "gradient": "unsharded weights take gradients from unsharded values",
    "features": "values for each feature are sharded like the features",
    "count": "a gradient that is equal on all ranks must not be summed over them",
    "draws": "sharded values need different random numbers on each rank",
    "same": "unsharded values need the same random numbers on each rank",
    "parts": "fused features are sharded part by part, and split into the same parts",
    "heads": "each rank has some of the heads",
    "shape": "on a rank only the sharded dimension is shorter",
    "partial": "a value computed from one rank's shard is no result",
    "output": "a model returns unsharded values",
    "retained": "values kept after a model's call are unsharded",
    "tied": "tied weights need one style",
    "inside": "a sharded weight is used only by its own layer",
}


class PlanError(UsageError):
    """A plan that breaks a rule, one of `RULES`, at a step."""

    def __init__(self, step: TraceStep, rule: str, actual: str, todo: str, state: Placement = UNKNOWN) -> None:
        place = f" ({step.place})" if step.place else ""
        super().__init__(f"plan: {step.where}: {RULES[rule]}, but {actual}: {todo}{place}")
        self.step, self.rule, self.state = step, rule, state


def refuse_partial(step: TraceStep, state: Placement) -> None:
    """Raise PlanError for a value computed from this rank's shard alone."""
    if state.name == "partial":
        raise PlanError(step, "partial", f"its input is {state}", "sum the values of all ranks first", state)


def count_error(step: TraceStep, state: Placement) -> PlanError:
    """Return the error for `Replicate(into_sharded=True)` on a layer whose output is used unsharded only."""
    actual = "its input has Replicate(into_sharded=True) but is used with unsharded values"
    return PlanError(step, "count", actual, "remove into_sharded", state)
