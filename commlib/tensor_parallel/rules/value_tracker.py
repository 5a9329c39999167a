"""Value tracking: placements of a model's values, up to the step reached. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commlib.tensor_parallel.placements import COMPUTED, CONSTANT, SHARED, UNKNOWN, WEIGHT, Placement
from commlib.tensor_parallel.rules.sharded_arguments import entries
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


@dataclass(frozen=True, slots=True)
class Doubt:
    """A step that the rules cannot verify, and the reason: it may be right or not. state: placement of its input.

    stays: equal numbers do not settle it; for example, one equal bit proves nothing about the next batch.
    """

    step: TraceStep
    state: Placement
    why: str
    stays: bool = False

    @property
    def is_of_gradient(self) -> bool:
        """Whether only the gradient is in doubt, which is user-written, and can be compared by numbers."""
        return self.step.kind == "unknown" and self.step.equation is not None

    def __str__(self) -> str:
        return f"{self.step.at}: {self.why}"


_UNKNOWN_DIM = (
    "its input is {}, but it is unknown which dimension of the model's arguments that is, so the operations before "
    "it are not checked"
)


@dataclass(slots=True)
class ValueTracker:
    """A trace, the styles of its layers, and the facts known so far. doubts: steps that could not be verified."""

    trace: ModelTrace
    styles: Mapping[str, Style]
    states: dict[int, Placement] = field(default_factory=dict)
    doubts: list[Doubt] = field(default_factory=list)
    size: int = 1
    """Number of ranks; 1 if it is not known."""
    unknown: set[int] = field(default_factory=set)
    """Values of unknown placement that are made of sharded values."""
    sequences_sharded: bool = False
    """Whether an argument of the model is a shard of a sequence already."""
    inputs_sharded: bool = False
    """Whether an argument of the model is a shard already, of any kind."""
    entered: dict[int, Placement] = field(default_factory=dict)
    """Arguments of the model that are shards already, as found from the input of a layer."""

    def follow(self, step: TraceStep, results: Placement | tuple[Placement, ...]) -> None:
        """Record the placement of a step's results: one for all, or one for each."""
        of_part = any(value in self.unknown or self._is_of_part(self.of(value)) for value in step.inputs)
        each = (results,) * len(step.outputs) if isinstance(results, Placement) else results
        for value, result in zip(step.outputs, each, strict=True):
            is_free = result in (COMPUTED, SHARED, WEIGHT) and value in self.trace.discrete
            self.states[value] = CONSTANT if is_free else result
            if of_part and result == UNKNOWN:
                self.unknown.add(value)

    def _is_of_part(self, state: Placement) -> bool:
        return state.is_divided or state.name == "partial"

    def of(self, value: int) -> Placement:
        """Return the state of a value."""
        return self.states.get(value, UNKNOWN)

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.trace.shapes.get(value, ())

    def dim(self, dim: int, value: int) -> int:
        """Return the non-negative index of a dimension of a value."""
        return dim % max(1, len(self.shape(value)))

    def result_dim(self, dim: int, step: TraceStep) -> int:
        """Return the non-negative index of a dimension of a step's result; of its input if it failed."""
        return self.dim(dim, (step.outputs or step.inputs)[0])

    def mark_sharded(self, step: TraceStep, value: int, state: Placement) -> None:
        """Record that the caller has sharded the arguments that a layer's input is made of.

        Other values made of them were followed as unsharded: they are followed again, see `entered`.
        """
        self.states[value] = state
        self.inputs_sharded = True
        self.sequences_sharded |= state.name == "sequence"
        arguments = entries(self.trace, value, state.dim)
        if not arguments:
            self.doubts.append(Doubt(step, state, _UNKNOWN_DIM.format(state), stays=True))
        for argument, dim in arguments.items():
            self.entered.setdefault(argument, state.at(dim))

    def again(self) -> ValueTracker:
        """Return the initial state for following the same trace again, with the arguments found to be shards."""
        return ValueTracker(
            self.trace, self.styles, size=self.size, entered=dict(self.entered),
            inputs_sharded=self.inputs_sharded, sequences_sharded=self.sequences_sharded,
        )  # fmt: skip

    def doubt(self, step: TraceStep, why: str, *, stays: bool = False) -> None:
        """Record a doubt about a step with a sharded or partial input; steps with other inputs get none.

        why: text, with {} for the placement. stays: see `Doubt`.
        """
        for state in map(self.of, step.inputs):
            if self._is_of_part(state):
                self.doubts.append(Doubt(step, state, why.format(state), stays))
                return
