"""CudaKernels: the CUDA kernels as the table that every device has. See `kernels.protocol`.

The host's kernels document the residuals, the layouts of payloads and the treatment of infinities and NaNs. They are
the same here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.kernels.cuda import arithmetic, codes, low_rank, rows, sparse
from commlib.kernels.cuda.launcher import KernelLauncher, pointer_to
from commlib.kernels.protocol import BlockLayout, Code, Fault, Value


class CudaKernels:
    """CUDA implementation of `kernels.protocol.Kernels`."""

    def __init__(self, launcher: KernelLauncher) -> None:
        self._launcher = launcher

    def reduce(self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], target: Any) -> None:
        arithmetic.reduce(self._launcher, dtype, operation, divisor, operands, target)

    def reduce_to(
        self, dtype: str, operation: str, divisor: int, operands: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        arithmetic.reduce_to(self._launcher, dtype, operation, divisor, operands, targets)

    def cast(self, source: Any, target: Any) -> None:
        arithmetic.cast(self._launcher, source, target)

    def fill(self, target: Any, value: int) -> None:
        arithmetic.fill(self._launcher, target, value)

    def scale(self, target: Any, factor: float) -> None:
        arithmetic.scale(self._launcher, target, factor)

    def pack(self, sources: Sequence[Any], target: Any) -> None:
        arithmetic.pack(self._launcher, sources, target)

    def unpack(self, source: Any, targets: Sequence[Any]) -> None:
        arithmetic.unpack(self._launcher, source, targets)

    def squares(self, x: Any) -> float:
        return arithmetic.squares(self._launcher, x)

    def is_finite(self, x: Any) -> bool:
        return arithmetic.is_finite(self._launcher, x)

    def add_momentum(self, gradient: Any, u: Any, u_after: Any, scale: float, momentum: float, nesterov: bool) -> None:
        arithmetic.add_momentum(self._launcher, gradient, u, u_after, scale, momentum, nesterov)

    def narrow(self, x: Any, before: Any, after: Any, payload: Any, bfloat: bool) -> None:
        codes.narrow(self._launcher, x, before, after, payload, bfloat)

    def widen(self, payload: Any, out: Any, bfloat: bool, add: bool) -> None:
        codes.widen(self._launcher, payload, out, bfloat, add)

    def quantise(
        self,
        x: Any,
        before: Any,
        after: Any,
        payload: Any,
        block: int,
        code: Code,
        top: float,
        by_norm: bool,
        at_random: bool,
        seed: int,
    ) -> None:
        codes.quantise(self._launcher, x, before, after, payload, block, code, top, by_norm, at_random, seed)

    def restore(self, payload: Any, out: Any, block: int, code: Code, add: bool) -> None:
        codes.restore(self._launcher, payload, out, block, code, add)

    def signs(self, x: Any, before: Any, after: Any, payload: Any, block: int) -> None:
        codes.signs(self._launcher, x, before, after, payload, block)

    def unsign(self, payload: Any, out: Any, block: int, add: bool) -> None:
        codes.unsign(self._launcher, payload, out, block, add)

    def draw(self, count: int, seed: int, places: Any) -> None:
        sparse.draw(self._launcher, count, seed, places)

    def take(self, x: Any, before: Any, after: Any, places: Any, scale: float, values: Any) -> None:
        sparse.take(self._launcher, x, before, after, places, scale, values)

    def place(self, values: Any, places: Any, out: Any) -> None:
        sparse.place(self._launcher, values, places, out)

    def copy_blocks(self, source: Any, target: Any, blocks: BlockLayout) -> None:
        copy_blocks(self._launcher, source, target, blocks)

    def take_rows(self, here: Any, there: Any, factors: Any, places: Any, width: int, target: Any) -> None:
        rows.take_rows(self._launcher, here, there, factors, places, width, target)

    def sum_rows(self, here: Any, there: Any, factors: Any, starts: Any, places: Any, width: int, target: Any) -> None:
        rows.sum_rows(self._launcher, here, there, factors, starts, places, width, target)

    def multiply_rows(self, rows_: Any, others: Any, factors: Any, width: int, scaled: Any, products: Any) -> None:
        rows.multiply_rows(self._launcher, rows_, others, factors, width, scaled, products)

    def random(self, x: Any, before: Any, after: Any, k: int, seed: int, scale: float, payload: Any) -> int:
        return sparse.random(self._launcher, x, before, after, k, seed, scale, payload)

    def largest(self, x: Any, before: Any, after: Any, k: int, value: Value, payload: Any) -> int:
        return sparse.largest(self._launcher, x, before, after, k, value, payload)

    def read_sparse(self, payload: Any, value: Value, out: Any, add: bool) -> Fault:
        return sparse.read_sparse(self._launcher, payload, value, out, add)

    def accumulate(
        self,
        gradient: Any,
        u: Any,
        v: Any,
        u_after: Any,
        v_after: Any,
        scale: float,
        momentum: float,
        nesterov: bool,
        k: int,
        value: Value,
        payload: Any,
    ) -> int:
        arrays = gradient, u, v, u_after, v_after
        return sparse.accumulate(self._launcher, *arrays, scale, momentum, nesterov, k, value, payload)

    def orthonormalise(self, vectors: Any, rank: int, epsilon: float) -> int:
        return low_rank.orthonormalise(self._launcher, vectors, rank, epsilon)

    def project(self, matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
        low_rank.project(self._launcher, matrix, before, rows, cols, right, left, rank)

    def project_back(self, matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
        low_rank.project_back(self._launcher, matrix, rows, cols, left, right, rank)

    def expand(
        self, matrix: Any, after: Any, rows: int, cols: int, left: Any, right: Any, own_right: Any, rank: int
    ) -> None:
        low_rank.expand(self._launcher, matrix, after, rows, cols, left, right, own_right, rank)


_FIELDS = ("rows", "columns", "run", "from_row", "from_column", "to_row", "to_column")
_Blocks = np.dtype([(name, "u8") for name in _FIELDS])

_SHORT, _THREADS = 32, 32
"""Length of runs below which threads copy single elements, and the number of elements per worker."""


def copy_blocks(launcher: KernelLauncher, source: Any, target: Any, blocks: BlockLayout) -> None:
    """Copy blocks of elements of any dtype, the same in both arrays, to another order of dimensions. See blocks.cu."""
    item = int(source.dtype.itemsize)
    units, defines = max(1, item // 8), {"ELEMENT": f"u{8 * min(item, 8)}"}
    layout = np.zeros((), _Blocks)
    for name in _FIELDS:
        layout[name] = getattr(blocks, name) * (units if name not in ("rows", "columns") else 1)
    count, length = blocks.rows * blocks.columns, blocks.run * units
    if length < _SHORT:
        kernel, workers = "copy_elements", -(-count * length // _THREADS)
    else:
        kernel, workers = "copy_blocks", count
    launcher.launch("blocks.cu", kernel, defines, workers, layout, pointer_to(source), pointer_to(target))
