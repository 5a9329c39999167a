"""`commlib show mesh`: the place of each rank in a mesh, and the axes that stay inside a node."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import typer

from commlib.console.width import fold
from commlib.errors import UsageError
from commlib.mesh import MeshShape

MOST_RANKS = 1 << 17

_EXAMPLE = "pp=2,dp=-1,tp=2"


def make_mesh(axes: str | None, refactorings: Sequence[str], ranks: int | None) -> MeshShape:
    """Return the mesh of axes such as "pp=2,dp=-1,tp=2" and refactorings such as "dp:edp=-1,ep=4".

    ranks: None if no axis is inferred: the product of the sizes. Raises UsageError.
    """
    if not axes:
        raise UsageError(f"mesh needs axes, the last one the fastest, such as --axes {_EXAMPLE}")
    sizes = _parse(axes, "--axes")
    if ranks is None:
        ranks = prod(size for _, size in sizes)
        if ranks < 1:
            raise UsageError(f"--axes {axes}: give --ranks, from which the axis with -1 is inferred")
    if ranks > MOST_RANKS:
        raise UsageError(f"{ranks} ranks are more than the {MOST_RANKS} of the largest mesh that can be drawn")
    mesh = MeshShape.of(sizes, ranks)
    for text in refactorings:
        old, colon, new = text.partition(":")
        if not colon:
            raise UsageError(f"--refactor {text!r}: expected old axes, a colon and new ones, such as dp:edp=-1,ep=4")
        sizes = _parse(new, "--refactor")
        if len(dict(sizes)) < len(sizes):
            raise UsageError(f"--refactor {text}: the names of the new axes must differ")
        mesh = mesh.refactor({tuple(old.split(",")): dict(sizes)})
    return mesh


def mesh_text(mesh: MeshShape, ranks_per_node: int | None, width: int | None) -> str:
    """Return the picture of a mesh, with its columns in blocks if they are wider than `width`."""
    parts = mesh.picture(ranks_per_node=ranks_per_node).split("\n\n")
    return "\n\n".join(fold(part, width).rstrip() for part in parts)


def mesh_data(mesh: MeshShape) -> dict[str, Any]:
    """Return the JSON data of a mesh: each axis with its groups, former axes last."""
    axes = [{"name": name, "size": mesh.size(name), "groups": mesh.groups(name)} for name in mesh.names]
    return {"ranks": mesh.ranks, "order": mesh.axes, "axes": axes}


def _parse(text: str, option: str) -> list[tuple[str, int]]:
    sizes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        try:
            sizes.append((name.strip(), int(size)))
        except ValueError:
            raise typer.BadParameter(f"{option}: {part!r} is no axis; expected names and sizes: {_EXAMPLE}") from None
    return sizes
