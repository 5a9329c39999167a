"""Mesh axes whose ranks have different data, and over which gradients are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlib.errors import UsageError

if TYPE_CHECKING:
    from commlib.mesh_groups import Mesh

DATA_AXES = ("dp", "edp", "ep", "cp")
"""Ranks along these axes have different rows, or different tokens of the same rows. Along other axes, ranks compute one
loss together. edp and ep, along which experts are replicated and sharded, may be parts of dp. Then dp covers both.
"""


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh over which gradients are averaged. Raises UsageError if it has none, or is no mesh."""
    if not hasattr(mesh, "axes"):
        raise UsageError(f"mesh= must be a commlib.Mesh, got {mesh!r}: pass ranks= for a communicator")
    is_part = "dp" in mesh and "dp" not in mesh.axes
    axes = tuple(axis for axis in DATA_AXES if axis in mesh and not (is_part and axis in ("edp", "ep")))
    if not axes:
        raise UsageError(
            f"mesh= reduces over its axes dp and cp, but {mesh.shape} has neither: add dp, or dp=1 if nothing is to be "
            "reduced"
        )
    return axes
