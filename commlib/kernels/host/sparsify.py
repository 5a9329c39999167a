"""Sparsification: compute, select, and write the payload and the residual of a gradient in one pass.

Arrays of float32 and payloads are given by their addresses. Without a residual `before` and `after` are 0; they may be
the same.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host import intrinsics as ins
from commlib.kernels.host.compilation import kernel
from commlib.kernels.host.select import collect, finish, room
from commlib.kernels.host.sparse import loss, write

# Elements that are computed before their selection, which finds them in the L1 cache.
BLOCK = 2048

_LARGEST = nb.float32(3.4028235e38)  # the largest finite float32


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def floats(address: int, start: int, stop: int) -> Any:
    return nb.carray(ins.as_pointer(address + 4 * start), stop - start, np.float32)


@nb.njit(inline="always")  # type: ignore[untyped-decorator]
def is_finite(value: float) -> Any:
    return abs(value) <= _LARGEST


@kernel(nogil=True)
def select_finite(new: Any, old: Any, out: Any, tested: Any) -> None:
    """Write `new` for elements whose `tested` is finite, else `old`; `out` may be `old`."""
    # LLVM vectorizes loops only if all loads are unconditional, and if it sees which memory is the same.
    if out.ctypes.data == old.ctypes.data:
        for i in range(len(out)):
            yes, no = new[i], out[i]
            out[i] = yes if is_finite(tested[i]) else no
    else:
        for i in range(len(out)):
            yes, no = new[i], old[i]
            out[i] = yes if is_finite(tested[i]) else no


@kernel(nogil=True)
def feed(x: Any, before: Any, after: Any, total: Any) -> None:
    """Write x + before to `total`, and to `after` if it is finite; otherwise `after` is `before`."""
    for i in range(len(x)):
        total[i] = x[i] + before[i]
    select_finite(total, before, after, total)


@kernel(nogil=True)
def encode_largest(source: int, before: int, after: int, count: int, k: int, kind: int, payload: int) -> int:
    """Write the k largest elements of x, or x + before, to the payload, and the loss to `after`; return the length."""
    indices, bits = np.empty(room(count, k), np.uint32), np.empty(room(count, k), np.uint32)
    filled, threshold = 0, 1  # zeros are never candidates
    scratch = np.empty(BLOCK, np.float32)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        y = x = floats(source, start, stop)
        if before != 0:
            y = scratch[: len(x)]  # not by its address, or numba would free it too early
            feed(x, floats(before, start, stop), floats(after, start, stop), y)
        filled, threshold = collect(y, start, k, indices, bits, filled, threshold)
    filled = finish(k, indices, bits, filled)
    if before != 0:
        left = floats(after, 0, count)
        for i in range(filled):
            lost = loss(kind, bits[i])
            if is_finite(lost):
                left[indices[i]] = lost
    return write(indices, bits, filled, kind, payload)


@kernel(nogil=True)
def encode_accumulated(
    gradient: int,
    u: int,
    v: int,
    u_after: int,
    v_after: int,
    count: int,
    scale: float,
    momentum: float,
    nesterov: bool,
    k: int,
    kind: int,
    payload: int,
) -> int:
    """Run a step of Deep Gradient Compression on a parameter (see `commlib.compress.schemes.dgc`); return the length.

    u and v, the momentum and the accumulated values, are inputs; their new values go to other arrays.
    """
    indices, bits = np.empty(room(count, k), np.uint32), np.empty(room(count, k), np.uint32)
    filled, threshold = 0, 1
    factor, decay = nb.float32(scale), nb.float32(momentum)
    scratch = np.empty((3, BLOCK), np.float32)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        g, old_u, old_v = floats(gradient, start, stop), floats(u, start, stop), floats(v, start, stop)
        new_u, new_v, scaled = scratch[0, : len(g)], scratch[1, : len(g)], scratch[2, : len(g)]
        for i in range(len(g)):
            scaled[i] = g[i] * factor
        if nesterov:
            for i in range(len(g)):
                new_u[i] = decay * (old_u[i] + scaled[i])
            for i in range(len(g)):
                new_v[i] = old_v[i] + new_u[i] + scaled[i]
        else:
            for i in range(len(g)):
                new_u[i] = decay * old_u[i] + scaled[i]
            for i in range(len(g)):
                new_v[i] = old_v[i] + new_u[i]
        select_finite(new_u, old_u, floats(u_after, start, stop), new_v)
        select_finite(new_v, old_v, floats(v_after, start, stop), new_v)
        filled, threshold = collect(new_v, start, k, indices, bits, filled, threshold)
    filled = finish(k, indices, bits, filled)
    masked, left = floats(u_after, 0, count), floats(v_after, 0, count)
    for i in range(filled):
        lost = loss(kind, bits[i])
        if is_finite(lost):
            left[indices[i]] = lost
            masked[indices[i]] = nb.float32(0)
    return write(indices, bits, filled, kind, payload)
