"""Mesh picture: draw a mesh as text, with its ranks and the groups along each axis.

The last axis runs to the right, all others run down. Large meshes are abridged: "…" marks omitted rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from commlib.topology import Topology

_WHOLE = 32  # ranks of the largest mesh that is drawn in full
_MOST = 16  # up to so many rows or columns of a larger mesh are all drawn
_HEAD, _TAIL = 6, 2  # the first and last ones drawn if there are more
_SOME = 4  # groups per axis, and ranks per group, drawn of a larger mesh
_GAP = "…"

T = TypeVar("T")


class DrawableMesh(Protocol):
    """The interface of `MeshShape` that the picture needs."""

    @property
    def ranks(self) -> int: ...

    @property
    def axes(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def size(self, *axes: str) -> int: ...

    def coordinate(self, rank: int, *axes: str) -> int: ...

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]: ...


_Nodes = dict[int, int]  # the node of each rank


def draw(mesh: DrawableMesh, topology: Topology | None) -> str:
    """Return the picture of a mesh; if its nodes are known, it marks the groups within a node and across nodes."""
    nodes = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks} if topology else {}
    title = f"{mesh}: {mesh.ranks} rank{'s' * (mesh.ranks != 1)}{_on(topology)}"
    grid, groups = _table(_grid(mesh, nodes)), _table(_groups(mesh, nodes))
    return f"{title}\n{grid}\n\nthe groups of each axis\n{groups}\n"


def _on(topology: Topology | None) -> str:
    if topology is None:
        return ""
    sizes = [len(ranks) for ranks in topology.nodes]
    return f", {len(sizes)} node{'s' * (len(sizes) != 1)} of {_between(min(sizes), max(sizes))}"


def _table(rows: Iterator[list[str]]) -> str:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(" │ ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def _grid(mesh: DrawableMesh, nodes: _Nodes) -> Iterator[list[str]]:
    """Yield the heading, and a row for each coordinate along all axes except the last."""
    *down, last = mesh.axes
    width = mesh.size(last)
    most = max(_MOST, _WHOLE if mesh.ranks <= _WHOLE else 0)
    columns = _abridge(range(width), most, _HEAD, _TAIL)
    titles = [_GAP if column is None else f"{last} {column}" for column in columns]
    yield [*down, *titles, *["node"] * bool(nodes)]
    before: list[str] = [""] * len(down)
    for row in _abridge(range(mesh.ranks // width), most, _HEAD, _TAIL):
        if row is None:
            before = [""] * len(down)
            yield [_GAP] * (len(down) + len(columns) + bool(nodes))
            continue
        ranks = range(row * width, (row + 1) * width)
        places = [str(mesh.coordinate(ranks[0], axis)) for axis in down]
        same = next((index for index, pair in enumerate(zip(places, before, strict=True)) if len(set(pair)) > 1), 0)
        shown = ["" if index < same else place for index, place in enumerate(places)]
        numbers = [_GAP if column is None else str(ranks[column]) for column in columns]
        yield [*shown, *numbers, *([_runs({nodes[rank] for rank in ranks})] if nodes else [])]
        before = places


def _groups(mesh: DrawableMesh, nodes: _Nodes) -> Iterator[list[str]]:
    """Yield the heading, and a row for each axis; axes of former views come last."""
    yield ["axis", "size", "groups", *["node"] * bool(nodes), "ranks"]
    for axis in mesh.names:
        groups = mesh.groups(axis)
        most = mesh.ranks if mesh.ranks <= _WHOLE else _SOME
        shown = [_GAP if group is None else _members(group, most) for group in _abridge(groups, most, _SOME - 1, 1)]
        where = [_crossing([len({nodes[rank] for rank in group}) for group in groups])] if nodes else []
        yield [axis, str(mesh.size(axis)), str(len(groups)), *where, ", ".join(shown)]


def _crossing(counts: list[int]) -> str:
    """Describe whether groups stay within a node, from each group's number of nodes."""
    inside = counts.count(1)
    if inside == len(counts):
        return "inside"
    if inside:
        return f"{len(counts) - inside} of {len(counts)} across"
    return f"across {_between(min(counts), max(counts))} nodes"


def _between(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _members(group: tuple[int, ...], most: int) -> str:
    return " ".join(_GAP if rank is None else str(rank) for rank in _abridge(group, most, _SOME - 1, 1))


def _abridge(items: Sequence[T], most: int, head: int, tail: int) -> list[T | None]:
    return [*items] if len(items) <= most else [*items[:head], None, *items[-tail:]]


def _runs(numbers: set[int]) -> str:
    """Format numbers as ranges: "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
