"""Mesh shapes: named axes and the ranks along them, pure arithmetic. `commlib.Mesh` makes communicators of them."""

from __future__ import annotations

from commlib.mesh.shape import Factors, MeshShape

__all__ = ["Factors", "MeshShape"]
