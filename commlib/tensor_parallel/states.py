"""States: how a value of a model lies on the ranks of an axis while a plan divides its layers. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul

from commlib.tensor_parallel.equations import Shape


@dataclass(frozen=True, slots=True)
class State:
    """How a value lies on the ranks.

    name: "whole" (the same on every rank), "features" or "sequence" (divided along `dim`), "partial" (made of this
    rank's part alone), "unknown" (nothing is claimed). by: what made it so. parts: of fused features, as Q, K and V,
    that are not split yet. unit: how many features stay together, such as those of a head; 0 if nobody said. units: how
    many stay whole, such as heads, which ranks share if they are fewer; 0 if nobody said. origin, of what is whole:
    "computed" from weights, "given" as an argument, "constant", a "weight" itself, or "shared": made to be used with
    what is divided. inner: another dimension, which those ranks that share a head divide among them; it will be joined
    with the one before. fused: of fused features, (length, units) of each part along `dim`; () if that is not known.
    place: which of such parts it was. learns: it is given, and its gradient goes on to what has made it outside.
    source, of what is partial: the layer that has divided what it is made of.
    """

    name: str
    dim: int = 0
    by: str = ""
    parts: int = 1
    unit: int = 0
    units: int = 0
    origin: str = ""
    inner: int = 0
    fused: tuple[tuple[int, int], ...] = ()
    place: int = 0
    learns: bool = False
    source: str = ""

    @property
    def is_divided(self) -> bool:
        return self.name in ("features", "sequence")

    def at(self, dim: int) -> State:
        """Return the same along another dimension."""
        return replace(self, dim=dim)

    def part(self, place: int, dim: int) -> State:
        """Return one of fused parts by itself. Of one head each rank has all, to be used with its own part of others.

        dim: along which it is divided.
        """
        units = self.fused[place][1] if self.fused else 0
        return SHARED if units == 1 else State("features", dim, self.by, 1, self.unit, units, place=place)

    def copies(self, size: int) -> int:
        """Return how many of `size` ranks share each head: 1 unless there are fewer heads than ranks."""
        return size // self.units if 0 < self.units < size and size % self.units == 0 else 1

    def __str__(self) -> str:
        if self.name == "sequence":
            return f"divided along dimension {self.dim}, a sequence (by {self.by})"
        if self.name == "features":
            return f"divided along dimension {self.dim} (by {self.by})"
        if self.name == "partial":
            return f"made of this rank's part alone (by {self.by})"
        return self.name


CALLER = "the caller"
"""Who has divided what a model is called with."""

SETTLED = -1
"""The unit of what was given a dimension of its own."""

UNKNOWN = State("unknown")
CONSTANT = State("whole", origin="constant")
GIVEN = State("whole", origin="given")
WEIGHT = State("whole", origin="weight")
SHARED = State("whole", origin="shared")
COMPUTED = State("whole", origin="computed")


def whole_of(states: list[State]) -> State:
    """Return what is computed of values that are whole."""
    origins = {state.origin for state in states}
    for origin in ("shared", "weight", "computed"):
        if origin in origins:
            return SHARED if origin == "shared" else COMPUTED
    if "given" not in origins:
        return CONSTANT
    return replace(GIVEN, learns=any(state.learns for state in states))


def reshaped(state: State, old: Shape, new: Shape, asked: Shape = ()) -> State | None:
    """Return how a divided value lies after the same elements are given another shape; None if its parts are torn.

    The divided dimension may become several, of which the first one is divided: heads and their features. It may be
    joined with those behind it. Fused parts may become a dimension of their own in front of it. asked: the shape as it
    was asked for: of several that it may be, -1 is the one whose length the model left open.
    """
    same = next((dim for dim in range(state.dim + 1) if new[dim : dim + 1] != old[dim : dim + 1]), state.dim + 1)
    if same > max(state.dim, state.inner):
        return state
    before, length = _before(old)[state.dim], old[state.dim]
    places = [dim for dim, count in enumerate(_before(new)) if count == before and dim >= same]
    if len(places) > 1:
        open_ones = [dim for dim in places if len(asked) == len(new) and asked[dim] == -1]
        if open_ones:
            places = open_ones
        elif length > 1 and state.unit != length:  # the one head of a rank is a dimension of length 1
            places = [dim for dim in places if new[dim] > 1]
    if not places and state.name == "features" and state.parts == 1 and not state.inner:
        return _joined(state, old, new)
    if not places or (length == 1 and len(places) > 1):
        return UNKNOWN
    dim = places[0]
    if state.inner:
        joined = prod(old[state.dim : state.inner + 1]) == new[dim]
        return replace(state, dim=dim, inner=0, units=0) if joined else UNKNOWN
    if state.parts == 1:
        return replace(state, dim=dim, unit=SETTLED if new[dim] < length else state.unit)
    if len(set(state.fused)) > 1 and new[dim] < length:  # heads of all parts
        inner = length // new[dim]
        if any(part % inner for part, _ in state.fused):
            return None
        fused = tuple((part // inner, units) for part, units in state.fused)
        return replace(state, dim=dim, unit=SETTLED, fused=fused)
    if new[dim] == state.parts and dim + 1 < len(new):
        return replace(state, dim=dim + 1, parts=1, fused=(), unit=SETTLED if dim + 2 < len(new) else state.unit)
    return state.at(dim) if new[dim] == length else None if new[dim] < length else UNKNOWN


def _joined(state: State, old: Shape, new: Shape) -> State:
    """Return how a value lies after its divided dimension is joined with those before it, as heads with a batch."""
    before = _before(old)
    for dim, count in enumerate(_before(new)):
        for first in range(state.dim):
            if before[first] == count and prod(old[first : state.dim + 1]) == new[dim]:
                return replace(state, dim=dim, parts=prod(old[first : state.dim]))
    return UNKNOWN


def _before(shape: Shape) -> list[int]:
    """Return for each dimension the product of those before it."""
    return list(accumulate(shape[:-1], mul, initial=1)) if shape else []
