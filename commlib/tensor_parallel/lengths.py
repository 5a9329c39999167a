"""Traced lengths: integers in the shapes that a model requests, which record their origin. [pure]

A model calls `x.view(rows, tokens, self.num_heads, self.head_dim)`, or `x.expand(*k.shape[:2], self.groups, -1)`. While
it is traced, its attributes and the lengths of shapes are of this class: integers with a formula. The formulas give the
shapes that the model would request on a rank, where tensors are shorter, and the attributes that must have the rank's
value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

Source = tuple[str, str] | tuple[int, int]
"""An attribute of a module, by their names; or a dimension of a value, by its number and its index."""

Known = Mapping[Source, int]
"""Values that differ on a rank from the unsharded model's."""


class NumberUses(dict[Source, str]):
    """Sources whose value was used as a number, and the user's line that did so. line: returns the running line."""

    def __init__(self, line: Callable[[], str] = str) -> None:
        super().__init__()
        self._line = line

    def note(self, sources: frozenset[Source]) -> None:
        """Add sources that are used now."""
        for source in sources.difference(self):
            self[source] = self._line()


class Length(int):
    """An integer computed from `sources`.

    used: receives the sources when the value is used as a number, and not for another length: as a float, or in a
    product with a tensor.
    """

    sources: frozenset[Source]
    formula: Callable[[Known], int]
    used: NumberUses

    @classmethod
    def of(cls, value: int, source: Source, used: NumberUses) -> Length:
        """Return the number of one source."""
        return cls.make(value, frozenset([source]), lambda known: known.get(source, int(value)), used)

    @classmethod
    def make(cls, value: int, sources: frozenset[Source], formula: Callable[[Known], int], used: NumberUses) -> Length:
        """Return a number with its formula."""
        length = cls(value)
        length.sources, length.formula, length.used = sources, formula, used
        return length

    def note_use(self) -> None:
        """Note that the value is used as a number."""
        self.used.note(self.sources)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # pickled or copied, it is a plain number

    def __neg__(self) -> Any:
        return 0 - self

    def __float__(self) -> float:
        self.note_use()
        return int.__float__(self)

    def __truediv__(self, other: Any) -> Any:
        self.note_use()
        return int.__truediv__(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        self.note_use()
        return int.__rtruediv__(self, other)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        self.note_use()
        return int.__pow__(self, other, modulo)

    def __rpow__(self, other: Any, modulo: Any = None) -> Any:
        self.note_use()
        return int.__rpow__(self, other, modulo)


def length_at(length: int, known: Known) -> int:
    """Return the value of a number on a rank. Raises ZeroDivisionError if its formula divides by 0 there."""
    return length.formula(known) if isinstance(length, Length) else length


def sources_of(length: int) -> frozenset[Source]:
    """Return the sources of a number."""
    return length.sources if isinstance(length, Length) else frozenset()


def attribute(source: Source) -> str:
    """Return the full name of a module's attribute; for attributes of the model itself the bare name."""
    return f"{source[0]}.{source[1]}" if source[0] else f"{source[1]}"


def source_of(name: str) -> Source:
    """Return the attribute of a module with a full name."""
    path, _, own = name.rpartition(".")
    return path, own


def _compute_length(compute: Callable[[int, int], int], left: Any, right: Any) -> Any:
    both = [one for one in (left, right) if isinstance(one, Length)]
    if not (isinstance(left, int) and isinstance(right, int)):
        for one in both:
            one.note_use()
        return NotImplemented
    sources = sources_of(left) | sources_of(right)
    value = compute(int(left), int(right))
    return Length.make(
        value, sources, lambda known: compute(length_at(left, known), length_at(right, known)), both[0].used
    )


def _operators(name: str, compute: Callable[[int, int], int]) -> None:
    setattr(Length, f"__{name}__", lambda self, other: _compute_length(compute, self, other))
    setattr(Length, f"__r{name}__", lambda self, other: _compute_length(compute, other, self))


for _name, _compute in {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}.items():
    _operators(_name, _compute)
