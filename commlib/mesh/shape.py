"""MeshShape: the axes of a mesh, and the ranks' coordinates and groups along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

from commlib.arguments import suggest
from commlib.errors import UsageError
from commlib.mesh.picture import draw
from commlib.mesh.sizes import INFERRED, Axis, Sizes, make_axes, text_of
from commlib.topology import Topology

Factors = Mapping[str | tuple[str, ...], Mapping[str, int] | Sequence[str]]
"""Axes, or products of axes, and the new axes of each: {"dp": {"edp": -1, "ep": 4}}, or {"dp": ("edp", "ep")}."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Named axes over the ranks 0, 1, ...; the last axis is the fastest: neighbours along it are consecutive ranks.

    Each view is a list of axes, slowest first, that covers all ranks. A new mesh has one view; each refactoring adds
    views over the same ranks, and the last view is the current one. Names of former axes stay valid.
    """

    ranks: int
    views: tuple[tuple[Axis, ...], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int] | Sizes, ranks: int) -> MeshShape:
        """Return the mesh of axes such as `{"pp": 2, "dp": -1, "tp": 2}`, slowest first; one -1 is inferred.

        Raises UsageError for names that are not identifiers, and for sizes whose product is not `ranks`.
        """
        wanted = tuple(sizes.items() if isinstance(sizes, Mapping) else sizes)
        if ranks < 1:
            raise UsageError(f"Mesh({text_of(wanted)}): there are {ranks} ranks; expected at least 1")
        return cls(ranks, (make_axes(f"Mesh({text_of(wanted)})", wanted, ranks, _ranks(ranks)),))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the current axes, slowest first."""
        return tuple(axis.name for axis in self.views[-1])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes: the current axes, then the former ones."""
        return tuple(dict.fromkeys(axis.name for view in reversed(self.views) for axis in view))

    def __str__(self) -> str:
        former = [name for name in self.names if name not in self.axes]
        parts = [text_of([(name, self.size(name)) for name in names]) for names in (self.axes, former) if names]
        return f"Mesh({'; '.join(parts)})"

    def size(self, *axes: str) -> int:
        """Return the number of ranks along an axis, or along a product of axes."""
        return prod(axis.size for axis in self.find(*axes))

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return a rank's coordinate along an axis, or its index along a product of axes (last one fastest)."""
        self._check_rank(rank)
        place = 0
        for axis in self.find(*axes):
            place = place * axis.size + axis.coordinate(rank)
        return place

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each current axis."""
        self._check_rank(rank)
        return {axis.name: axis.coordinate(rank) for axis in self.views[-1]}

    def rank_at(self, /, **coordinates: int) -> int:
        """Return the rank at a coordinate along each axis of one view. Raises UsageError."""
        names = set(coordinates)
        view = next((view for view in self.views if {axis.name for axis in view} == names), None)
        if view is None:
            known = " or ".join(", ".join(axis.name for axis in view) for view in self.views)
            raise UsageError(f"{self}: rank_at needs a coordinate along each of {known}; got {', '.join(coordinates)}")
        for axis in view:
            if not 0 <= coordinates[axis.name] < axis.size:
                raise UsageError(f"{self}: {axis.name} is {coordinates[axis.name]}, expected 0 to {axis.size - 1}")
        return sum(axis.stride * coordinates[axis.name] for axis in view)

    def first(self, rank: int, *axes: str) -> int:
        """Return the lowest rank of a rank's group; it identifies the group."""
        self._check_rank(rank)
        return rank - sum(axis.stride * axis.coordinate(rank) for axis in self.find(*axes))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return a rank's group along these axes, itself included, the last axis fastest."""
        first, own_axes = self.first(rank, *axes), self.find(*axes)
        steps = product(*(range(0, axis.stride * axis.size, axis.stride) for axis in own_axes))
        return tuple(first + sum(step) for step in steps)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of all ranks along an axis or a product of axes, in the order of their lowest ranks."""
        firsts = dict.fromkeys(self.first(rank, *axes) for rank in range(self.ranks))
        return tuple(self.group(first, *axes) for first in firsts)

    def refactor(self, factors: Factors, /, **sizes: int) -> MeshShape:
        """Return a mesh of the same ranks with some axes replaced by others: {"dp": {"edp": -1, "ep": 4}}.

        A key is an axis, or a tuple of axes that follow each other in this order. The value maps the new names to their
        sizes, or lists names whose sizes are keywords: `refactor({"dp": ("edp", "ep")}, ep=4)`. Both forms infer one
        missing size. The old names stay valid, alone and together with axes that do not overlap them. Raises
        UsageError.
        """
        mesh, left = self, dict(sizes)
        for key, value in factors.items():
            old = (key,) if isinstance(key, str) else tuple(key)
            if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
                raise UsageError(f"refactor of {', '.join(old)}: expected names, or names with sizes, got {value!r}")
            named = value.items() if isinstance(value, Mapping) else [(name, left.pop(name, None)) for name in value]
            mesh = mesh._refactor_axis(old, tuple(named))
        if left:
            raise UsageError(
                f"{self}: refactor: {text_of(tuple(left.items()))}: keywords must be new names without sizes"
            )
        return mesh

    def _refactor_axis(self, old: tuple[str, ...], new: tuple[tuple[str, Any], ...]) -> MeshShape:
        old_axes = self.find(*old)
        known = tuple((name, INFERRED if size is None else size) for name, size in new)
        what = f"{self}: refactor of {' x '.join(old)} into {text_of(known)}"
        for name, _ in known:
            if name in self.names:
                raise UsageError(f"{what}: there is already an axis {name}; names must be new, also among former axes")
        places = [(view, at) for view in self.views if (at := _find_run(view, old_axes)) is not None]
        if not places:
            raise UsageError(f"{what}: these axes do not follow each other in the order {', '.join(self.axes)}")
        total = prod(axis.size for axis in old_axes)
        axes = make_axes(what, known, total, f"{_ranks(total)} along {' x '.join(old)}", old_axes[-1].stride)
        views = [(*view[:at], *axes, *view[at + len(old_axes) :]) for view, at in places]
        return MeshShape(self.ranks, (*self.views, *views))

    def picture(self, *, ranks_per_node: int | None = None, topology: Topology | None = None) -> str:
        """Draw the ranks, and the groups along each axis; large meshes are abridged.

        ranks_per_node: the nodes have so many consecutive ranks each; topology: the nodes have any ranks. With either,
        the picture marks the groups within a node.
        """
        if ranks_per_node is not None:
            if ranks_per_node < 1 or topology is not None:
                raise UsageError(f"picture: ranks_per_node is {ranks_per_node}; expected at least 1, and no topology")
            topology = Topology.of([rank // ranks_per_node for rank in range(self.ranks)])
        if topology is not None and sum(map(len, topology.nodes)) != self.ranks:
            raise UsageError(f"picture: the topology has {sum(map(len, topology.nodes))} ranks, the mesh {self.ranks}")
        return draw(self, topology)

    def find(self, *axes: str) -> tuple[Axis, ...]:
        """Return axes by name. Raises UsageError for unknown axes, and for axes that overlap."""
        known = {axis.name: axis for view in self.views for axis in view}
        for name in axes:
            if name not in known:
                raise UsageError(
                    f"{self} has no axis {name!r}; it has {', '.join(self.names)}{suggest(name, self.names)}"
                )
        if not axes or len(set(axes)) < len(axes):
            raise UsageError(f"{self}: expected one axis or different ones, got {', '.join(axes) or 'none'}")
        if not self._are_independent(axes):
            clash = next((pair for pair in combinations(axes, 2) if not self._are_independent(pair)), axes)
            raise UsageError(f"{self}: {' and '.join(clash)} share a part of the mesh: no product of them exists")
        return tuple(known[name] for name in axes)

    def _are_independent(self, axes: Sequence[str]) -> bool:
        return any({axis.name for axis in view}.issuperset(axes) for view in self.views)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise UsageError(f"{self}: rank is {rank}, expected 0 to {self.ranks - 1}")


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _find_run(view: tuple[Axis, ...], run: tuple[Axis, ...]) -> int | None:
    """Return the index of the first axis of `run` in `view`, or None."""
    starts = range(len(view) - len(run) + 1)
    return next((start for start in starts if view[start : start + len(run)] == run), None)
