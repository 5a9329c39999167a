"""Following: the states of a model's values, as far as its steps have been followed. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commlib.tensor_parallel.rules.entering import entries
from commlib.tensor_parallel.states import COMPUTED, CONSTANT, SHARED, UNKNOWN, WEIGHT, State
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Doubt:
    """What the rules cannot tell of a step, in words: it may be right or not. state: of what the step takes.

    stays: numbers that agree do not settle it, as one bit that is the same proves nothing of the next batch.
    """

    step: Step
    state: State
    why: str
    stays: bool = False

    @property
    def is_of_gradient(self) -> bool:
        """Whether all that cannot be told is the gradient, which somebody has written, and numbers are compared of."""
        return self.step.kind == "unknown" and self.step.equation is not None

    def __str__(self) -> str:
        return f"{self.step.at}: {self.why}"


_UNTOLD = (
    "its input is {}, and nobody can tell which dimension of the model's arguments that has been, so what the model "
    "does with these before is not looked at"
)


@dataclass(slots=True)
class Following:
    """A trace, the styles of its layers, and what is known so far. doubts: what could not be told."""

    trace: Trace
    styles: Mapping[str, Style]
    states: dict[int, State] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    size: int = 1
    """How many ranks there are, if that is known."""
    unknown: set[int] = field(default_factory=set)
    """Values of which nothing is known, made of what is divided."""
    sequences_came: bool = False
    """An argument of the model is a part of a sequence already."""
    came_in_parts: bool = False
    """An argument of the model is a part already, of whatever kind."""
    entered: dict[int, State] = field(default_factory=dict)
    """Arguments of the model that are parts already, as a layer has told that takes what is made of them."""

    def follow(self, step: Step, results: State | tuple[State, ...]) -> None:
        """Keep the state of what a step gives, or of each of its results."""
        of_part = any(value in self.unknown or self._is_of_part(self.of(value)) for value in step.inputs)
        each = (results,) * len(step.outputs) if isinstance(results, State) else results
        for value, result in zip(step.outputs, each, strict=True):
            is_free = result in (COMPUTED, SHARED, WEIGHT) and value in self.trace.discrete
            self.states[value] = CONSTANT if is_free else result
            if of_part and result == UNKNOWN:
                self.unknown.add(value)

    def _is_of_part(self, state: State) -> bool:
        return state.is_divided or state.name == "partial"

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

    def came_divided(self, step: Step, value: int, state: State) -> None:
        """Take what is made of the model's arguments for what a layer takes it for: the caller has divided these.

        What else is made of them was followed as if they were whole: it is followed again, see `entered`.
        """
        self.states[value] = state
        self.came_in_parts = True
        self.sequences_came |= state.name == "sequence"
        found = entries(self.trace, value, state.dim)
        if not found:
            self.doubts.append(Doubt(step, state, _UNTOLD.format(state), stays=True))
        for argument, dim in found.items():
            self.entered.setdefault(argument, state.at(dim))

    def again(self) -> Following:
        """Return what is known at the beginning, of the same trace, by somebody who has followed it once."""
        return Following(
            self.trace, self.styles, size=self.size, entered=dict(self.entered),
            came_in_parts=self.came_in_parts, sequences_came=self.sequences_came,
        )  # fmt: skip

    def doubt(self, step: Step, why: str, *, stays: bool = False) -> None:
        """Note what cannot be told of a step that takes what is divided, or made of a part; none of any other step.

        why: in words, with {} for how that lies on the ranks. stays: see `Doubt`.
        """
        for state in map(self.of, step.inputs):
            if self._is_of_part(state):
                self.doubts.append(Doubt(step, state, why.format(state), stays))
                return
