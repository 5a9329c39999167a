"""Families: a mixture and its copies, such as an average of its weights. Their experts move together.

Who updates one of them from another, weight by weight, would else mix different experts. A copy is what `copy.deepcopy`
makes, and what has loaded the weights of another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any


class Family:
    """A layer and the copies of it, and of these; what each is a copy of is known after that has gone."""

    def __init__(self) -> None:
        self._layers: list[weakref.ref[Any]] = []
        self._pairs: set[tuple[int, int]] = set()
        """Numbers of copies, and of what they are copies of."""

    def __deepcopy__(self, memo: Any) -> Family:
        return self

    def join(self, layer: Any, original: int | None = None) -> int:
        """Add a layer, a copy of the one with another number; return its own."""
        number = len(self._layers)
        self._layers.append(weakref.ref(layer))
        if original is not None:
            self.relate(number, original)
        return number

    def relate(self, number: int, original: int) -> None:
        """Note that one has become a copy of another one."""
        self._pairs.add((number, original))

    def marry(self, other: Family, number: int, original: int) -> dict[Any, int]:
        """Take in another family, one of which has become a copy of one of this; return its layers' new numbers."""
        first = len(self._layers)
        self._layers += other._layers
        self._pairs |= {(first + one, first + two) for one, two in other._pairs}
        self.relate(first + number, original)
        return {layer: first + at for at, one in enumerate(other._layers) if (layer := one()) is not None}

    def copies(self, layers: Sequence[Any]) -> list[list[Any]]:
        """Return of some of its layers the others that are copies of each, or of which it is one.

        That is: to which it is nearest. One that is as near to another layer is of neither.
        """
        beside: list[list[int]] = [[] for _ in self._layers]
        for number, original in self._pairs:
            beside[number].append(original)
            beside[original].append(number)
        own = [next(n for n, one in enumerate(self._layers) if one() is layer) for layer in layers]
        nearest = {number: {place} for place, number in enumerate(own)}
        edge = nearest
        while edge:
            reached: dict[int, set[int]] = {}
            for number, places in edge.items():
                for other in beside[number]:
                    if other not in nearest:
                        reached.setdefault(other, set()).update(places)
            nearest, edge = {**nearest, **reached}, reached
        found: list[list[Any]] = [[] for _ in layers]
        for number, reference in enumerate(self._layers):
            layer, places = reference(), nearest.get(number, set())
            if layer is not None and number not in own and len(places) == 1:
                found[next(iter(places))].append(layer)
        return found
