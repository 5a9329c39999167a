"""Trace: what a model does with an input, as data: its layers, and the operations between them. [pure]

Values have numbers. A step takes some and makes others; steps stand in the order in which they ran. Kinds of steps:

    given       an argument of the model; `constant`: a value that comes from elsewhere and has no gradient, as a mask
    weight      a weight of the model that is used by itself, outside the layers below
    unseen      a value that nothing has made which could be seen; of a function that was tried on parts, an equation
    product     a layer that mixes all features: linear layers, convolutions
    table       a layer that looks rows up: embeddings
    attention   a layer that is a whole attention, with its projections
    equation    what an `Equation` describes: elementwise operations, norms, softmax, products of activations, ...
    slice       an argument of a module that has no gradient, of which it may be given this rank's part
    reshape     the same elements in the same order in another shape
    split       pieces along a dimension; `join` puts pieces together
    piece       neighbours that are picked along a dimension, of which there are more; with an equation, too
    gradient    what a function that nobody can look into gives for the gradient of one that it takes
    unknown     anything else: of what is whole it makes what is whole, of all else nothing is known; with an
                equation that tells of its values, and a gradient that somebody has written
    shape       the shape of a divided layer's weight is asked for, outside of that layer
    number      elements of a value leave the tensors, as numbers of Python or arrays of numpy: item, a condition; or,
                with a `dim`, the length of that
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from commlib.tensor_parallel.equations import Equation, Shape
from commlib.tensor_parallel.lengths import Source


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a layer, or of an operation within it.

    layer: its name; "" for an operation between layers. text: what it is, such as "Linear", or "softmax in blocks.0".
    dim: along which is split or joined. dims: those of a product's features, before and after, or of the features that
    each have weights of their own in an equation. size: what a layer has in the whole: (inputs, outputs) of a product,
    (words, features) of a table, (heads, heads) of attention, (groups, features) of a norm of groups. weights: an
    equation with weights of its own, such as a norm. draws: it draws random numbers, such as dropout. untold: of a
    layer that was tried on parts, what nobody could tell, in words. asked: the shape that a reshape, an expansion or a
    constant was asked for, -1 included, or the lengths of pieces, if numbers were given: `lengths` where these are
    known; of a piece where it begins and ends, as a slice says that. place: the line that makes the call, as file:line.
    The last step of a call that failed has no outputs.
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
    untold: str = ""
    asked: tuple[int, ...] = ()
    place: str = ""

    @property
    def where(self) -> str:
        """Return how messages call it."""
        said = self.text or self.kind
        return f"{self.layer} ({said})" if self.layer else said

    @property
    def at(self) -> str:
        """Return how messages call it, and the line that makes the call."""
        return f"{self.where}, {self.place}" if self.place else self.where


@dataclass(frozen=True)
class Trace:
    """The steps of one call, the shapes of all values, and the numbers of those that the model returns.

    tied: layers that share a weight. whole: the model was not divided yet, and shapes are those of the whole.
    discrete: values that are integers or booleans, and so have no gradient. learns: arguments whose gradients go on to
    what has made them. used: sources of `lengths` whose number the model uses for something else than a shape, and the
    line that does. numbers: the attributes among them, by names such as "h.0.num_heads". kept: values that the model
    has made, and neither returns nor lets go: somebody holds them after its call, as an attribute or a list does.
    detached: values without a gradient that could come back to weights, as the model has cut it off.
    """

    steps: tuple[Step, ...]
    shapes: Mapping[int, Shape]
    outputs: tuple[int, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    whole: bool = True
    discrete: frozenset[int] = frozenset()
    learns: frozenset[int] = frozenset()
    used: Mapping[Source, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    kept: tuple[int, ...] = ()
    detached: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> Mapping[int, Sequence[int]]:
        """Which steps take a value, by its number."""
        found: dict[int, list[int]] = {}
        for at, step in enumerate(self.steps):
            for value in dict.fromkeys(step.inputs):
                found.setdefault(value, []).append(at)
        return found

    @property
    def way(self) -> Hashable:
        """Return what tells calls apart that go other ways through a model, whatever the lengths of their values are.

        But for lengths that the model says itself: where a batch has another one, it may say another one.
        """
        steps = tuple(
            (step.layer, step.kind, step.text, step.dim, step.dims, step.asked, _dimensions(step.equation), step.inputs)
            for step in self.steps
        )
        return steps, tuple(self.used), self.outputs

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """Which step makes a value, by its number."""
        return {value: at for at, step in enumerate(self.steps) for value in step.outputs}

    def maker(self, value: int) -> Step:
        """Return the step that makes a value."""
        return self.steps[self.makers[value]]


def _dimensions(equation: Equation | None) -> Hashable:
    """Return which dimensions meet, also where one of length 1 is repeated along another."""
    if equation is None:
        return None
    numbers = tuple(tuple(max(number, ~number) for number in dims) for dims in equation.inputs)
    return numbers, equation.output, equation.needs


def reach(trace: Trace, users: Mapping[int, Sequence[int]], step: Step) -> tuple[list[Step], set[int]]:
    """Return the layers that a layer's result reaches without another one between, and the values on the way."""
    ends: dict[int, Step] = {}
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
