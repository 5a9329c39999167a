"""Products of a matrix with a few vectors, and their orthonormalization. See low_rank.cu and orthonormal.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.kernels.cuda.arguments import pointer_to, u32, u64
from commlib.kernels.cuda.launcher import LaunchedKernels

# The numbers of low_rank.cu.
_ROWS = 8
_COLS = 128  # columns per worker in project_back
_WORKERS = 4096  # target number of parts on every device, because sums must not depend on the device


class LowRankKernels(LaunchedKernels):
    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        work, dropped = self._scratch(8 * len(vectors)), self._scratch(4)
        arguments = (
            pointer_to(vectors),
            u64(len(vectors) // rank),
            u32(rank),
            np.float64(epsilon),
            pointer_to(work),
            pointer_to(dropped),
        )
        self._launch("orthonormal.cu", "orthonormalise", {}, 1, *arguments)
        return int(self._read(dropped, np.int32)[0])

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        bands = _divide_up(rows, _ROWS)
        part = _part(bands, cols, 128, 4096)
        number = _divide_up(cols, part)
        parts = left if number == 1 else self._scratch(4 * number * len(left))
        arguments = (
            pointer_to(matrix),
            _address_or_null(before),
            u64(rows),
            u64(cols),
            u64(part),
            pointer_to(right),
            pointer_to(parts),
            u32(rank),
        )
        self._launch("low_rank.cu", "project", _defines(rank), bands * number, *arguments)
        self._add_up(parts, number, left, rank)

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        bands = _divide_up(cols, _COLS)
        part = _part(bands, rows, 32, 1024)
        number = _divide_up(rows, part)
        parts = right if number == 1 else self._scratch(4 * number * len(right))
        arguments = pointer_to(matrix), u64(rows), u64(cols), u64(part), pointer_to(left), pointer_to(parts), u32(rank)
        self._launch("low_rank.cu", "project_back", _defines(rank), bands * number, *arguments)
        self._add_up(parts, number, right, rank)

    def expand(
        self,
        matrix: Any,
        after: Any,
        rows: int,
        cols: int,
        left: Any,
        right: Any,
        own_right: Any,
        rank: int,
    ) -> None:
        shape = u64(rows), u64(cols)
        arguments = (
            pointer_to(matrix),
            _address_or_null(after),
            *shape,
            pointer_to(left),
            pointer_to(right),
            pointer_to(own_right),
            u32(rank),
        )
        self._launch(
            "low_rank.cu", "expand", _defines(rank), _divide_up(cols, 32) * _divide_up(rows, _ROWS), *arguments
        )

    def _add_up(self, parts: Any, number: int, out: Any, rank: int) -> None:
        if number > 1:
            arguments = pointer_to(parts), u64(number), pointer_to(out), u64(len(out))
            self._launch("low_rank.cu", "add_up_parts", _defines(rank), _divide_up(len(out), 32), *arguments)


def _defines(rank: int) -> dict[str, object]:
    """Return the number of vectors per pass, the same for all kernels of a product, which thus share one module."""
    return {"RANKS": 4 if rank <= 4 else 8}


def _part(bands: int, length: int, least: int, most: int) -> int:
    """Return the length of one part: a multiple of `least`, long enough that every worker has one."""
    return min(max(_divide_up(length * bands, _WORKERS * least), 1) * least, most)


def _address_or_null(x: Any) -> np.uint64:
    """Return the address of an array; 0 if it is empty."""
    return pointer_to(x if len(x) else None)


def _divide_up(count: int, share: int) -> int:
    return -(-count // share)
