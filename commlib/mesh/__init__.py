"""Named axes and the ranks along them: pure arithmetic, nothing is sent. `commlib.Mesh` makes communicators of it."""

from __future__ import annotations

from commlib.mesh.shape import Factors, MeshShape

__all__ = ["Factors", "MeshShape"]
