"""Products of a matrix with a few vectors, for PowerSGD: one pass over the matrix per product, for all factors.

A matrix is `rows * cols` float32 in row-major order. Its factors are stored vector by vector: `left` is rank x rows,
`right` is rank x cols. Every rank computes the last product separately, but with the same bits, even on different CPUs.
It therefore uses plain IEEE arithmetic in a fixed order. A BLAS library would choose its order by the CPU.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compilation import kernel

_f4 = nb.float32

# Columns per pass: the reused parts of rows and factors stay in the L1 cache.
_TILE = 1024

# The loops below process rows in twos or fours and factors in fours or twos, to use each loaded number often. Missing
# rows or factors are replaced by zeros, because a separate loop for each case would be slower to read and to compile.
# The results for them are not read, or stay zero.


@kernel(nogil=True)
def _piece(matrix: Any, row: int, rows: int, cols: int, start: int, stop: int, zeros: Any) -> Any:
    if row < rows:
        return matrix[row * cols + start : row * cols + stop]
    return zeros[: stop - start]


@kernel(nogil=True)
def _pieces(factor: Any, k: int, rank: int, cols: int, start: int, stop: int, zeros: Any) -> Any:
    return (
        _piece(factor, k, rank, cols, start, stop, zeros),
        _piece(factor, k + 1, rank, cols, start, stop, zeros),
        _piece(factor, k + 2, rank, cols, start, stop, zeros),
        _piece(factor, k + 3, rank, cols, start, stop, zeros),
    )


@kernel(nogil=True)
def _add(x: Any, y: Any) -> None:
    for j in range(len(x)):
        x[j] += y[j]


# Results that only this rank sees may be added up in any order (reassoc) and fused (contract).
@kernel(nogil=True, fastmath={"reassoc", "contract"})
def _dots(x: Any, z: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    xa, xb, xc, xd = _f4(0), _f4(0), _f4(0), _f4(0)
    za, zb, zc, zd = _f4(0), _f4(0), _f4(0), _f4(0)
    for j in range(len(x)):
        v, w = x[j], z[j]
        xa += v * a[j]
        xb += v * b[j]
        xc += v * c[j]
        xd += v * d[j]
        za += w * a[j]
        zb += w * b[j]
        zc += w * c[j]
        zd += w * d[j]
    return (xa, xb, xc, xd), (za, zb, zc, zd)


@kernel(nogil=True)
def project(matrix: Any, before: Any, rows: int, cols: int, right: Any, left: Any, rank: int) -> None:
    """Add `before` to the matrix (unless it is empty), and write left = right matrix^T."""
    left[:] = _f4(0)
    zeros, more = np.zeros(_TILE, np.float32), np.zeros(_TILE, np.float32)
    for start in range(0, cols, _TILE):
        stop = min(cols, start + _TILE)
        for i in range(0, rows, 2):
            x = _piece(matrix, i, rows, cols, start, stop, zeros)
            z = _piece(matrix, i + 1, rows, cols, start, stop, zeros)
            if len(before):
                _add(x, _piece(before, i, rows, cols, start, stop, more))
                _add(z, _piece(before, i + 1, rows, cols, start, stop, more))
            for k in range(0, rank, 4):
                a, b, c, d = _pieces(right, k, rank, cols, start, stop, more)
                first, second = _dots(x, z, a, b, c, d)
                for f in range(min(4, rank - k)):
                    left[(k + f) * rows + i] += first[f]
                    if i + 1 < rows:
                        left[(k + f) * rows + i + 1] += second[f]


@kernel(nogil=True, fastmath={"contract"})
def _combine(x: Any, y: Any, z: Any, w: Any, a: Any, b: Any, p: Any, q: Any) -> None:
    p0, p1, p2, p3 = p
    q0, q1, q2, q3 = q
    for j in range(len(x)):
        a[j] += p0 * x[j] + p1 * y[j] + p2 * z[j] + p3 * w[j]
        b[j] += q0 * x[j] + q1 * y[j] + q2 * z[j] + q3 * w[j]


@kernel(nogil=True)
def _four(left: Any, k: int, rank: int, i: int, rows: int) -> Any:
    at = k * rows + i
    if k >= rank:
        return _f4(0), _f4(0), _f4(0), _f4(0)
    return (
        left[at],
        left[at + 1] if i + 1 < rows else _f4(0),
        left[at + 2] if i + 2 < rows else _f4(0),
        left[at + 3] if i + 3 < rows else _f4(0),
    )


@kernel(nogil=True)
def project_back(matrix: Any, rows: int, cols: int, left: Any, right: Any, rank: int) -> None:
    """Write right = left matrix."""
    right[:] = _f4(0)
    zeros, more = np.zeros(_TILE, np.float32), np.zeros(_TILE, np.float32)
    for start in range(0, cols, _TILE):
        stop = min(cols, start + _TILE)
        for i in range(0, rows, 4):
            x, y, z, w = _pieces(matrix, i, rows, cols, start, stop, zeros)
            for k in range(0, rank, 2):
                a = _piece(right, k, rank, cols, start, stop, more)
                b = _piece(right, k + 1, rank, cols, start, stop, more)
                _combine(x, y, z, w, a, b, _four(left, k, rank, i, rows), _four(left, k + 1, rank, i, rows))


# x and z are the losses or values of two rows. The first four factors write them, further factors update them.
@kernel(nogil=True)
def _lose(x: Any, z: Any, from_x: Any, from_z: Any, a: Any, b: Any, c: Any, d: Any, p: Any, q: Any) -> None:
    p0, p1, p2, p3 = p
    q0, q1, q2, q3 = q
    for j in range(len(x)):
        f, g, h, k = a[j], b[j], c[j], d[j]
        x[j] = from_x[j] - (((p0 * f + p1 * g) + p2 * h) + p3 * k)
        z[j] = from_z[j] - (((q0 * f + q1 * g) + q2 * h) + q3 * k)


@kernel(nogil=True)
def _make(x: Any, z: Any, a: Any, b: Any, c: Any, d: Any, p: Any, q: Any) -> None:
    p0, p1, p2, p3 = p
    q0, q1, q2, q3 = q
    for j in range(len(x)):
        f, g, h, k = a[j], b[j], c[j], d[j]
        x[j] = ((p0 * f + p1 * g) + p2 * h) + p3 * k
        z[j] = ((q0 * f + q1 * g) + q2 * h) + q3 * k


@kernel(nogil=True)
def _add_products(x: Any, z: Any, a: Any, b: Any, c: Any, d: Any, p: Any, q: Any) -> None:
    p0, p1, p2, p3 = p
    q0, q1, q2, q3 = q
    for j in range(len(x)):
        f, g, h, k = a[j], b[j], c[j], d[j]
        x[j] += ((p0 * f + p1 * g) + p2 * h) + p3 * k
        z[j] += ((q0 * f + q1 * g) + q2 * h) + q3 * k


@kernel(nogil=True)
def _down(left: Any, k: int, rank: int, i: int, rows: int, sign: Any) -> Any:
    at = k * rows + i
    if i >= rows:
        return _f4(0), _f4(0), _f4(0), _f4(0)
    return (
        sign * left[at],
        sign * left[at + rows] if k + 1 < rank else _f4(0),
        sign * left[at + 2 * rows] if k + 2 < rank else _f4(0),
        sign * left[at + 3 * rows] if k + 3 < rank else _f4(0),
    )


@kernel(nogil=True)
def expand(matrix: Any, after: Any, rows: int, cols: int, left: Any, right: Any, own_right: Any, rank: int) -> None:
    """Write after = matrix - left^T own_right (unless it is empty), then matrix = left^T right."""
    zeros, more, spare = np.zeros(_TILE, np.float32), np.zeros(_TILE, np.float32), np.zeros(_TILE, np.float32)
    for start in range(0, cols, _TILE):
        stop = min(cols, start + _TILE)
        for i in range(0, rows, 2):
            x = _piece(matrix, i, rows, cols, start, stop, zeros)
            z = _piece(matrix, i + 1, rows, cols, start, stop, zeros)
            for k in range(0, rank if len(after) else 0, 4):
                lost_x = _piece(after, i, rows, cols, start, stop, spare)
                lost_z = _piece(after, i + 1, rows, cols, start, stop, spare)
                a, b, c, d = _pieces(own_right, k, rank, cols, start, stop, more)
                sign = _f4(1) if k == 0 else _f4(-1)
                p, q = _down(left, k, rank, i, rows, sign), _down(left, k, rank, i + 1, rows, sign)
                if k == 0:
                    _lose(lost_x, lost_z, x, z, a, b, c, d, p, q)
                else:
                    _add_products(lost_x, lost_z, a, b, c, d, p, q)
            for k in range(0, rank, 4):
                a, b, c, d = _pieces(right, k, rank, cols, start, stop, more)
                p, q = _down(left, k, rank, i, rows, _f4(1)), _down(left, k, rank, i + 1, rows, _f4(1))
                if k == 0:
                    _make(x, z, a, b, c, d, p, q)
                else:
                    _add_products(x, z, a, b, c, d, p, q)
