"""Broken: the rules that a plan must obey, and the error that says which one it breaks. [pure]"""

from __future__ import annotations

from commlib.errors import UsageError
from commlib.tensor_parallel.states import UNKNOWN, State
from commlib.tensor_parallel.trace import Step

RULES = {
    "whole": "a layer that is not divided takes all features of all rows",
    "column": "a Column takes what is whole",
    "row": "a Row takes what a Column has divided",
    "sequence": "what is gathered along a sequence must be divided along it",
    "meet": "what is divided meets only what is divided the same way",
    "needs": "an operation that needs all of a dimension takes none that is divided",
    "gradient": "weights that are whole take gradients from the whole",
    "features": "what has something for each feature is divided as these are",
    "count": "a gradient that is whole on every rank must not be added up over them",
    "draws": "what is divided needs other random numbers on each rank",
    "same": "what is whole needs the same random numbers on each rank",
    "parts": "fused features are divided part by part, and split into the same parts",
    "heads": "a rank has some of the heads",
    "shape": "on a rank the divided dimension is shorter, and no other",
    "partial": "what is made of one rank's part is no result",
    "output": "a model returns what is whole",
    "kept": "what is kept after a model's call is whole",
    "tied": "tied weights need one style",
    "inside": "a divided weight is used by its own layer alone",
}


class PlanError(UsageError):
    """A plan that breaks a rule, one of `RULES`, at a step."""

    def __init__(self, step: Step, rule: str, came: str, todo: str, state: State = UNKNOWN) -> None:
        place = f" ({step.place})" if step.place else ""
        super().__init__(f"plan: {step.where}: {RULES[rule]}, but {came}: {todo}{place}")
        self.step, self.rule, self.state = step, rule, state


def refuse_partial(step: Step, state: State) -> None:
    """Raise PlanError for what is made of this rank's part alone."""
    if state.name == "partial":
        raise PlanError(step, "partial", f"its input is {state}", "add the parts of all ranks up first", state)


def counted(step: Step, state: State) -> PlanError:
    """Return the error for what has `Replicate(into_sharded=True)` and is not used so."""
    came = "its input has Replicate(into_sharded=True) and is used with what is whole"
    return PlanError(step, "count", came, "leave into_sharded out", state)
