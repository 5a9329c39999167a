"""Following: the states of a model's values, as far as its steps have been followed. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commlib.tensor.states import UNKNOWN, State
from commlib.tensor.styles import Style
from commlib.tensor.trace import Step, Trace


@dataclass(slots=True)
class Following:
    """A trace, the styles of its layers, and what is known so far. doubts: what could not be told, in words."""

    trace: Trace
    styles: Mapping[str, Style]
    states: dict[int, State] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    sequences_came: bool = False
    """An argument of the model is a part of a sequence already."""

    def of(self, value: int) -> State:
        """Return the state of a value."""
        return self.states.get(value, UNKNOWN)

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.trace.shapes.get(value, ())

    def dim(self, dim: int, value: int) -> int:
        """Return a dimension of a value, counted from the front."""
        return dim % max(1, len(self.shape(value)))

    def result_dim(self, dim: int, step: Step) -> int:
        """Return a dimension of a step's result, counted from the front; that of its input if it failed."""
        return self.dim(dim, (step.outputs or step.inputs)[0])

    def came_divided(self, value: int, state: State) -> None:
        """Take an argument of the model for what a layer takes it for: the caller has divided it."""
        self.states[value] = state
        self.sequences_came |= state.name == "sequence"
