"""Products of a matrix with few vectors, and what makes those orthonormal. See low_rank.cu and orthonormal.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.cuda.arguments import at, u32, u64
from commlib.kernels.cuda.launcher import Launcher

# The numbers of low_rank.cu.
_ROWS = 8
_COLS = 128  # that a worker takes in project_back
_WORKERS = 4096  # parts are so long that about as many have one, on whatever device: its sums must not depend on it


def orthonormalise(launcher: Launcher, vectors: Any, rank: int, epsilon: float) -> int:
    """Make float32 vectors orthonormal in place; return how many became zero, -1 if one is not finite."""
    work, dropped = launcher.scratch(8 * len(vectors)), launcher.scratch(4)
    arguments = at(vectors), u64(len(vectors) // rank), u32(rank), np.float64(epsilon), at(work), at(dropped)
    launcher.launch("orthonormal.cu", "orthonormalise", {}, 1, *arguments)
    return int(launcher.read(dropped, np.int32)[0])


def project(
    launcher: Launcher, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int
) -> None:
    """Add `before` to a matrix (unless it is empty), and write left = matrix right."""
    bands = _up(rows, _ROWS)
    part = _part(bands, cols, 128, 4096)
    number = _up(cols, part)
    parts = left if number == 1 else launcher.scratch(4 * number * len(left))
    arguments = at(matrix), _at_any(before), u64(rows), u64(cols), u64(part), at(right), at(parts), u32(rank)
    launcher.launch("low_rank.cu", "project", _defines(rank), bands * number, *arguments)
    _add_up(launcher, parts, number, left, rank)


def project_back(launcher: Launcher, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
    """Write right = matrix^T left."""
    bands = _up(cols, _COLS)
    part = _part(bands, rows, 32, 1024)
    number = _up(rows, part)
    parts = right if number == 1 else launcher.scratch(4 * number * len(right))
    arguments = at(matrix), u64(rows), u64(cols), u64(part), at(left), at(parts), u32(rank)
    launcher.launch("low_rank.cu", "project_back", _defines(rank), bands * number, *arguments)
    _add_up(launcher, parts, number, right, rank)


def expand(
    launcher: Launcher,
    matrix: Any,
    after: Any,
    rows: int,
    cols: int,
    left: Any,
    right: Any,
    own_right: Any,
    rank: int,
) -> None:
    """Write after = matrix - left own_right^T (unless it is empty), then matrix = left right^T."""
    shape = u64(rows), u64(cols)
    arguments = at(matrix), _at_any(after), *shape, at(left), at(right), at(own_right), u32(rank)
    launcher.launch("low_rank.cu", "expand", _defines(rank), _up(cols, 32) * _up(rows, _ROWS), *arguments)


def _add_up(launcher: Launcher, parts: Any, number: int, out: Any, rank: int) -> None:
    if number > 1:
        arguments = at(parts), u64(number), at(out), u64(len(out))
        launcher.launch("low_rank.cu", "add_up_parts", _defines(rank), _up(len(out), 32), *arguments)


def _defines(rank: int) -> dict[str, object]:
    """Return how many vectors are taken at a time, for all kernels of a product, so that they are one module."""
    return {"RANKS": 4 if rank <= 4 else 8}


def _part(bands: int, length: int, least: int, most: int) -> int:
    """Return how much of a length one part has: a multiple of `least`, as much as gives all workers one."""
    return min(max(_up(length * bands, _WORKERS * least), 1) * least, most)


def _at_any(x: Any) -> np.uint64:
    """Return the address of an array; 0 if it is empty."""
    return at(x if len(x) else None)


def _up(count: int, share: int) -> int:
    return -(-count // share)
