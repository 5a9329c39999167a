"""StepRecording: number a framework's tensors while a model runs, and record its steps. [pure]"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from commlib.tensor_parallel.equations import Shape
from commlib.tensor_parallel.lengths import Length, NumberUses, source_of
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


class StepRecording:
    """The steps recorded so far. Tensors are identified by `key`, so all of them are kept alive with the recording.

    shape_of: returns a tensor's shape. outside: for a tensor that no step has made, returns the kind of step
    ("constant" or "weight") that it comes from and its layer, or None if unknown. is_discrete: returns whether a tensor
    has integers or booleans. line: returns the running line of the user's code.
    """

    def __init__(
        self,
        shape_of: Callable[[Any], Shape],
        outside: Callable[[Any], tuple[str, str] | None],
        key: Callable[[Any], Hashable] = id,
        is_discrete: Callable[[Any], bool] = lambda tensor: False,
        line: Callable[[], str] = str,
    ) -> None:
        self._shape_of, self._outside, self._key, self._is_discrete = shape_of, outside, key, is_discrete
        self._numbers: dict[Hashable, int] = {}
        self._outside_tensors = set[Hashable]()
        """Tensors from outside."""
        self.tensors: list[Any] = []
        """Tensors by their numbers."""
        self._steps: list[TraceStep] = []
        self.learned = set[int]()
        """Values computed from weights."""
        self.line = line
        self.used = NumberUses(line)
        """Lengths that were used as numbers."""
        self.produced = set[int]()
        """Values computed from other values."""
        self.detached = set[int]()
        """Values whose gradient reaches no weight."""
        self.detaches = False
        """Whether the model has turned off gradients for the running code."""
        self.numbers: dict[str, int] = {}
        """Attributes of modules that may occur in shapes."""

    def number_of(self, tensor: Any) -> int | None:
        """Return the number of a tensor; None if no step has used it."""
        return self._numbers.get(self._key(tensor))

    def add(self, layer: str, kind: str, inputs: Iterable[Any], outputs: Iterable[Any], **more: Any) -> None:
        """Record a step. Its results are new values, even if a tensor was changed in place."""
        input_numbers = tuple(self.number(tensor) for tensor in inputs)
        results = list(outputs)
        output_numbers = tuple(map(self._new, results))
        self._outside_tensors.update(map(self._key, results if kind == "given" else ()))
        if (layer and kind != "slice") or not self.learned.isdisjoint(input_numbers):
            self.learned.update(output_numbers)
        self.produced.update(output_numbers if input_numbers else ())
        has_weights = kind in ("product", "table", "attention") or more.get("weights", False)
        if (
            self.detaches
            or kind == "constant"
            or (input_numbers and not has_weights and self.detached.issuperset(input_numbers))
        ):
            self.detached.update(output_numbers)
        self._steps.append(TraceStep(layer, kind, input_numbers, output_numbers, **more))

    def lengths_of(self, number: int, shape: Shape) -> tuple[Length, ...]:
        """Return the lengths of a value as integers that remember their origin."""
        return tuple(Length.of(length, (number, dim), self.used) for dim, length in enumerate(shape))

    def attribute_lengths(self, values: Mapping[str, int]) -> dict[str, Length]:
        """Return attributes of modules, by name, as integers that remember their origin."""
        self.numbers |= values
        return {name: Length.of(value, source_of(name), self.used) for name, value in values.items()}

    def has_number(self, tensor: Any) -> bool:
        """Return whether a tensor has a number already."""
        return self._key(tensor) in self._numbers

    def is_from_outside(self, tensor: Any) -> bool:
        """Return whether a tensor existed before the run: its value changes only if it is written to."""
        return self._key(tensor) in self._outside_tensors

    def add_alias(self, tensor: Any, number: int) -> None:
        """Identify another tensor with a value from now on. The caller must keep it alive as long as this."""
        self._numbers[self._key(tensor)] = number

    def detach(self, tensor: Any) -> None:
        """Note that the gradient of a value is cut off at this tensor."""
        self.detached.add(self.number(tensor))

    def trace(
        self, results: Sequence[Any], tied: Iterable[tuple[str, ...]], *, whole: bool, retained: Iterable[int] = ()
    ) -> ModelTrace:
        """Return the trace of a model that returned `results`. retained: values that are kept after the call."""
        outputs = tuple(self.number(tensor) for tensor in results)
        shapes = {number: self._shape_of(tensor) for number, tensor in enumerate(self.tensors)}
        discrete = frozenset(number for number, tensor in enumerate(self.tensors) if self._is_discrete(tensor))
        return ModelTrace(
            tuple(self._steps),
            shapes,
            outputs,
            tuple(tied),
            whole,
            discrete,
            used=dict(self.used),
            numbers=dict(self.numbers),
            retained=tuple(sorted(self.produced.intersection(retained) - set(outputs))),
            detached=discrete | self.detached,
        )

    def number(self, tensor: Any) -> int:
        """Return the number of a value; a value that no step has made comes from outside."""
        known = self._numbers.get(self._key(tensor))
        if known is not None:
            return known
        kind, layer = self._outside(tensor) or ("unseen", "")
        text = f"a weight of {layer or 'the model'}" if kind == "weight" else "a value from outside"
        number = self._new(tensor)
        self._outside_tensors.add(self._key(tensor))
        if kind == "weight":
            self.learned.add(number)
        elif kind == "constant":
            self.detached.add(number)
        self._steps.append(TraceStep(layer, kind, (), (number,), text))
        return number

    def _new(self, tensor: Any) -> int:
        self._numbers[self._key(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def running_line(packages: Sequence[str]) -> str:
    """Return the running line of the user's code, as file:line. packages: folders of other code."""
    frame = _outside(packages)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def runs_within(folders: Sequence[str], packages: Sequence[str]) -> bool:
    """Return whether the running code, outside of some packages, is in one of these folders."""
    frame = _outside(packages)
    return frame is not None and frame.f_code.co_filename.startswith(tuple(folders))


def _outside(packages: Sequence[str]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*packages, "<")):
        frame = frame.f_back
    return frame


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name of a module or a class within a context: for a framework's call that has no hook.

    An inherited attribute of a class is overridden in the class meanwhile.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
