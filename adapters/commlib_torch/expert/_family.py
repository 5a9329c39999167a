"""Families: a mixture and its copies, such as a weight average. Their experts move together.

Otherwise, an update of one from another, weight by weight, would mix different experts. Copies are made by
`copy.deepcopy`, or by loading another layer's weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any


class Family:
    """A layer and its direct and indirect copies; the relation survives the deletion of a layer."""

    def __init__(self) -> None:
        self._layers: list[weakref.ref[Any]] = []
        self._pairs: set[tuple[int, int]] = set()
        """Pairs of numbers: a copy, and its original."""

    def __deepcopy__(self, memo: Any) -> Family:
        return self

    def join(self, layer: Any, original: int | None = None) -> int:
        """Add a layer, a copy of the layer with the number `original`; return its number."""
        number = len(self._layers)
        self._layers.append(weakref.ref(layer))
        if original is not None:
            self.relate(number, original)
        return number

    def relate(self, number: int, original: int) -> None:
        """Record that a layer has become a copy of another one."""
        self._pairs.add((number, original))

    def merge(self, other: Family, number: int, original: int) -> dict[Any, int]:
        """Merge another family, because one of its layers has become a copy; return the new numbers of its layers."""
        first = len(self._layers)
        self._layers += other._layers
        self._pairs |= {(first + one, first + two) for one, two in other._pairs}
        self.relate(first + number, original)
        return {layer: first + at for at, one in enumerate(other._layers) if (layer := one()) is not None}

    def copies(self, layers: Sequence[Any]) -> list[list[Any]]:
        """For each of some layers, return the other layers that are its copies, or its originals.

        These are the layers nearest to it. A layer that is equally near to another one belongs to neither.
        """
        neighbours: list[list[int]] = [[] for _ in self._layers]
        for number, original in self._pairs:
            neighbours[number].append(original)
            neighbours[original].append(number)
        own = [next(n for n, one in enumerate(self._layers) if one() is layer) for layer in layers]
        nearest = {number: {place} for place, number in enumerate(own)}
        edge = nearest
        while edge:
            reached: dict[int, set[int]] = {}
            for number, places in edge.items():
                for other in neighbours[number]:
                    if other not in nearest:
                        reached.setdefault(other, set()).update(places)
            nearest, edge = {**nearest, **reached}, reached
        copies: list[list[Any]] = [[] for _ in layers]
        for number, reference in enumerate(self._layers):
            layer, places = reference(), nearest.get(number, set())
            if layer is not None and number not in own and len(places) == 1:
                copies[next(iter(places))].append(layer)
        return copies
