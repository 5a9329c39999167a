"""Axes of a mesh whose ranks have different data, and over which gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlib.errors import UsageError

if TYPE_CHECKING:
    from commlib.mesh_groups import Mesh

DATA_AXES = ("dp", "edp", "ep", "cp")
"""Ranks along them have other rows, or other tokens of the same rows. Along others they compute one loss together.

edp and ep, along which experts have copies and are divided, may be parts of dp, which then stands for both.
"""


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh over which gradients are averaged. Raises UsageError if it has none."""
    is_part = "dp" in mesh and "dp" not in mesh.axes
    found = tuple(axis for axis in DATA_AXES if axis in mesh and not (is_part and axis in ("edp", "ep")))
    if not found:
        raise UsageError(
            f"mesh= says over which ranks to reduce by its axis dp, and cp if there is one; {mesh.shape} has neither: "
            "give it one, dp=1 if nothing is to be reduced"
        )
    return found
