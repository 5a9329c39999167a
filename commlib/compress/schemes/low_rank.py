"""Low-rank factors: factor one matrix of a bucket for PowerSGD, between its messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.compress.feedback import is_finite
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart
from commlib.kernels.protocol import Kernels

# Well below the largest float32, 3.4e38: sums below it cannot overflow, in any order of addition.
_SAFE = 1e38


@dataclass(frozen=True, slots=True)
class LowRankMatrix:
    """A parameter as a matrix, with its range in the bucket, the residuals and the factors, in elements."""

    part: BucketPart
    rank: int
    residual: slice
    left: slice
    right: slice
    epsilon: float
    seed: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.part.shape[0]

    @property
    def cols(self) -> int:
        return self.part.count // self.part.shape[0]

    def begin(self, memory: Memory, factor: Any, step: int) -> None:
        """Replace empty rows of `factor` (rank * cols) by random ones, then make the rows orthonormal.

        A row of zeros would stay zero forever. It occurs after a gradient was zero once.
        """
        orthonormalise = memory.kernels.orthonormalise
        if orthonormalise(factor, self.rank, self.epsilon) == 0:
            return
        (values,) = memory.on_host(factor)
        rows = values.reshape(self.rank, self.cols)
        empty = ~rows.any(axis=1)
        # Uniform numbers, because the bits of normal ones depend on a library's logarithm.
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self.seed, step))))
        rows[empty] = generator.random((int(empty.sum()), self.cols), np.float32) - np.float32(0.5)
        memory.put(factor, values)
        orthonormalise(factor, self.rank, self.epsilon)

    def project(self, kernels: Kernels, values: Any, before: Any, right: Any, left: Any) -> None:
        """Add the residual `before`, if any, to the matrix in the bucket `values`, and write left = matrix right."""
        kernels.project(self._of(values), before[self.residual], self.rows, self.cols, right, left, self.rank)

    def project_back(self, kernels: Kernels, values: Any, left: Any, right: Any) -> bool:
        """Make `left` orthonormal and write right = matrix^T left; return False if `left` is not finite."""
        if kernels.orthonormalise(left, self.rank, self.epsilon) < 0:
            kernels.fill(right, 0)
            return False
        kernels.project_back(self._of(values), self.rows, self.cols, left, right, self.rank)
        return True

    def expand(self, kernels: Kernels, values: Any, after: Any, left: Any, right: Any, own_right: Any) -> bool:
        """Write this rank's loss to the residual `after`, if any, and left right^T to the matrix.

        Returns whether the matrix is finite.
        """
        matrix = self._of(values)
        kernels.expand(matrix, after[self.residual], self.rows, self.cols, left, right, own_right, self.rank)
        if isinstance(right, np.ndarray):
            # No element of `left` is larger than 1, so `right` bounds the product.
            most = np.abs(right.reshape(self.rank, self.cols)).sum(axis=0, dtype=np.float64).max()
            if most < _SAFE:
                return True
        return is_finite(matrix)

    def spoil(self, kernels: Kernels, values: Any) -> None:
        """Set the matrix to NaN, with the same bits on all ranks."""
        matrix = self._of(values)
        kernels.fill(matrix, 0)
        kernels.scale(matrix, math.nan)

    def _of(self, values: Any) -> Any:
        return values[self.part.start : self.part.stop]
