"""Placements of a model's values on the ranks of an axis, with the layers sharded by a plan. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul

from commlib.tensor_parallel.equations import Shape


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a value on the ranks.

    name: "whole" (the same on every rank), "features" or "sequence" (sharded along `dim`), "partial" (computed from
    this rank's shard alone), "unknown". by: the layer that caused it. parts: number of fused features, such as Q, K and
    V, that are not split yet. unit: number of features that stay together, such as a head's; 0 if unknown.
    units: number of pieces that are not split, such as heads, which ranks share if there are fewer; 0 if unknown.
    origin, of a "whole" value: "computed" from weights, "given" as an argument, "constant", a "weight" itself, or
    "shared": meant to combine with sharded values. inner: another dimension, split among the ranks that share a head,
    to be joined with the one before it. fused: (length, units) of each of the fused parts along `dim`; () if unknown.
    place: the index of such a part after splitting. learns: whether it is an argument whose gradient flows to its maker
    outside. source, of a "partial" value: the layer that sharded its inputs.
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

    def at(self, dim: int) -> Placement:
        """Return the same placement along another dimension."""
        return replace(self, dim=dim)

    def part(self, place: int, dim: int) -> Placement:
        """Return the placement of one of the fused parts. A part with one head is on all ranks, shared by their heads.

        dim: the sharded dimension.
        """
        units = self.fused[place][1] if self.fused else 0
        return SHARED if units == 1 else Placement("features", dim, self.by, 1, self.unit, units, place=place)

    def copies(self, size: int) -> int:
        """Return how many of `size` ranks share each head: 1 unless there are fewer heads than ranks."""
        return size // self.units if 0 < self.units < size and size % self.units == 0 else 1

    def __str__(self) -> str:
        if self.name == "sequence":
            return f"sharded along dimension {self.dim}, a sequence (by {self.by})"
        if self.name == "features":
            return f"sharded along dimension {self.dim} (by {self.by})"
        if self.name == "partial":
            return f"computed from this rank's shard alone (by {self.by})"
        return self.name


CALLER = "the caller"
"""Origin of a sharding of the model's arguments."""

SETTLED = -1
"""The unit of features that have a separate dimension."""

UNKNOWN = Placement("unknown")
CONSTANT = Placement("whole", origin="constant")
GIVEN = Placement("whole", origin="given")
WEIGHT = Placement("whole", origin="weight")
SHARED = Placement("whole", origin="shared")
COMPUTED = Placement("whole", origin="computed")


def combine_unsharded(states: list[Placement]) -> Placement:
    """Return the placement of a result computed from unsharded values."""
    origins = {state.origin for state in states}
    for origin in ("shared", "weight", "computed"):
        if origin in origins:
            return SHARED if origin == "shared" else COMPUTED
    if "given" not in origins:
        return CONSTANT
    return replace(GIVEN, learns=any(state.learns for state in states))


def reshape_placement(state: Placement, old: Shape, new: Shape, requested: Shape = ()) -> Placement | None:
    """Return the placement of a sharded value after a reshape; None if its parts are separated.

    The sharded dimension may be split into several; the first of them is sharded: heads and their features. It may be
    joined with later ones. Fused parts may become a separate dimension before it. requested: the requested shape: among
    several candidates, -1 marks the dimension whose length the model left open.
    """
    same = next((dim for dim in range(state.dim + 1) if new[dim : dim + 1] != old[dim : dim + 1]), state.dim + 1)
    if same > max(state.dim, state.inner):
        return state
    before, length = _products_before(old)[state.dim], old[state.dim]
    places = [dim for dim, count in enumerate(_products_before(new)) if count == before and dim >= same]
    if len(places) > 1:
        open_ones = [dim for dim in places if len(requested) == len(new) and requested[dim] == -1]
        if open_ones:
            places = open_ones
        elif length > 1 and state.unit != length:  # one head of a rank is a dimension of length 1
            places = [dim for dim in places if new[dim] > 1]
    if not places and state.name == "features" and state.parts == 1 and not state.inner:
        return _join_dims(state, old, new)
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


def _join_dims(state: Placement, old: Shape, new: Shape) -> Placement:
    """Return the placement after the sharded dimension is joined with earlier ones, such as heads with a batch."""
    before = _products_before(old)
    for dim, count in enumerate(_products_before(new)):
        for first in range(state.dim):
            if before[first] == count and prod(old[first : state.dim + 1]) == new[dim]:
                return replace(state, dim=dim, parts=prod(old[first : state.dim]))
    return UNKNOWN


def _products_before(shape: Shape) -> list[int]:
    """Return for each dimension the product of the lengths before it."""
    return list(accumulate(shape[:-1], mul, initial=1)) if shape else []
