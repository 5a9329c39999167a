"""ModelTrace: a model's run on an input as data: its layers, and the operations between them. [pure]

Values have numbers. A step takes values and makes others; steps are in the order of their execution. Kinds of steps:

    given       an argument of the model; `constant`: a value from elsewhere without a gradient, such as a mask
    weight      a weight of the model that is used directly, outside the layers below
    unseen      a value of unknown origin; for a function that was tried on shards, with an equation
    product     a layer that mixes all features: linear layers, convolutions
    table       a layer that looks up rows: embeddings
    attention   a layer that is a complete attention, with its projections
    equation    an operation with an `Equation`: elementwise operations, norms, softmax, products of activations, ...
    slice       an argument of a module that has no gradient; a rank may get its slice of it
    reshape     the same elements in the same order in another shape
    split       pieces along a dimension; `join` concatenates or stacks pieces
    piece       a slice of contiguous elements along a dimension; with an equation, too
    gradient    the gradient of an input that an opaque function returns
    unknown     any other operation: with unsharded inputs its result is unsharded, otherwise unknown; with an
                equation, if only its gradient is user-written
    shape       the shape of a sharded layer's weight is read, outside of that layer
    number      elements of a value are read as Python numbers or numpy arrays: item, a condition; or, with a `dim`,
                its length
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from commlib.tensor_parallel.equations import Equation, Shape
from commlib.tensor_parallel.lengths import Source


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One call of a layer, or of an operation within it.

    layer: its name; "" for an operation between layers. text: a description, such as "Linear", or "softmax in
    blocks.0". dim: the dimension of a split or join. dims: the feature dimensions of a product, before and after, or
    the dimension of an equation's features that each have their own weights. size: full size of a layer: (inputs,
    outputs) of a product, (words, features) of a table, (heads, heads) of attention, (groups, features) of a norm of
    groups. weights: an equation with weights, such as a norm. draws: whether it draws random numbers, such as dropout.
    open_doubt: open doubt about a layer that was tried on shards, as text. requested: the shape requested by a reshape,
    an expansion or a constant, including -1, or the lengths of pieces, if given as numbers: `lengths` if these are
    known; for a piece its start and stop, as in a slice. place: the line of the call, as file:line. The last step of a
    failed call has no outputs.
    """

    layer: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    text: str = ""
    equation: Equation | None = None
    dim: int = -1
    dims: tuple[int, int] = (-1, -1)
    size: tuple[int, int] = (0, 0)
    weights: bool = False
    draws: bool = False
    open_doubt: str = ""
    requested: tuple[int, ...] = ()
    place: str = ""

    @property
    def where(self) -> str:
        """Return its name in messages."""
        text = self.text or self.kind
        return f"{self.layer} ({text})" if self.layer else text

    @property
    def at(self) -> str:
        """Return its name in messages, and the line of the call."""
        return f"{self.where}, {self.place}" if self.place else self.where


@dataclass(frozen=True)
class ModelTrace:
    """The steps of one call, the shapes of all values, and the numbers of the values that the model returns.

    tied: layers that share a weight. whole: whether the model was unsharded, so shapes are full ones. discrete: values
    that are integers or booleans, and so have no gradient. learns: arguments whose gradients flow to their makers.
    used: sources of `lengths` whose value the model uses for other purposes than a shape, with the line that does so.
    numbers: the attributes among them, by names such as "h.0.num_heads". retained: values that the model has made, does
    not return, and that are still referenced after its call, for example by an attribute or a list. detached: values
    without a gradient to weights, because the model has cut it off.
    """

    steps: tuple[TraceStep, ...]
    shapes: Mapping[int, Shape]
    outputs: tuple[int, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    whole: bool = True
    discrete: frozenset[int] = frozenset()
    learns: frozenset[int] = frozenset()
    used: Mapping[Source, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    retained: tuple[int, ...] = ()
    detached: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> Mapping[int, Sequence[int]]:
        """The steps that take each value, by its number."""
        result: dict[int, list[int]] = {}
        for at, step in enumerate(self.steps):
            for value in dict.fromkeys(step.inputs):
                result.setdefault(value, []).append(at)
        return result

    @property
    def way(self) -> Hashable:
        """A key that is equal for calls with the same operations, whatever the lengths of their values.

        Lengths that the model itself passes are part of it, although they may vary with the batch.
        """
        steps = tuple(
            (
                step.layer,
                step.kind,
                step.text,
                step.dim,
                step.dims,
                step.requested,
                _dimensions(step.equation),
                step.inputs,
            )
            for step in self.steps
        )
        return steps, tuple(self.used), self.outputs

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """The step that makes each value, by its number."""
        return {value: at for at, step in enumerate(self.steps) for value in step.outputs}

    def maker(self, value: int) -> TraceStep:
        """Return the step that makes a value."""
        return self.steps[self.makers[value]]


def _dimensions(equation: Equation | None) -> Hashable:
    """Return the dimensions that are combined, including those where length 1 is broadcast along another one."""
    if equation is None:
        return None
    numbers = tuple(tuple(max(number, ~number) for number in dims) for dims in equation.inputs)
    return numbers, equation.output, equation.needs


def reach(trace: ModelTrace, users: Mapping[int, Sequence[int]], step: TraceStep) -> tuple[list[TraceStep], set[int]]:
    """Return the layers that a layer's result reaches without another layer between, and the values on the way."""
    ends: dict[int, TraceStep] = {}
    waiting, seen = list(step.outputs), set(step.outputs)
    while waiting:
        for at in users.get(waiting.pop(), ()):
            user = trace.steps[at]
            if user.kind in ("product", "table", "attention"):
                ends[at] = user
            else:
                waiting += [value for value in user.outputs if value not in seen]
                seen.update(user.outputs)
    return [ends[at] for at in sorted(ends)], seen
