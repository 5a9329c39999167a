"""Adam's and LAMB's arithmetic on float32, in one pass each and in a fixed order: all ranks get the same bits.

first, second: the moments. correct_first, correct_second: what they are divided by, because they began at zero.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compiled import kernel

_f4 = nb.float32

# Elements whose ratios are in the cache at once.
_BLOCK = 1024

# Divided as IEEE 754 says: Python's way, to raise where the divisor is 0, could not be done with vectors.
_NUMPY = "numpy"


@kernel(nogil=True)
def accumulate(gradient: Any, first: Any, second: Any, parameter: Any, decay: Any, beta1: Any, beta2: Any) -> None:
    """Let the moments follow the gradient + decay * parameter."""
    rest1, rest2 = _f4(1 - beta1), _f4(1 - beta2)
    decay, beta2 = _f4(decay), _f4(beta2)
    for i in range(len(gradient)):
        g = gradient[i] + decay * parameter[i]
        first[i] = first[i] + rest1 * (g - first[i])
        second[i] = beta2 * second[i] + rest2 * g * g


@kernel(nogil=True)
def blend(gradient: Any, first: Any, parameter: Any, decay: Any, beta1: Any, scale: Any) -> None:
    """Replace the gradient by scale times what the first moment becomes with gradient + decay * parameter."""
    rest, decay, scale = _f4(1 - beta1), _f4(decay), _f4(scale)
    for i in range(len(gradient)):
        g = gradient[i] + decay * parameter[i]
        gradient[i] = scale * (first[i] + rest * (g - first[i]))


@kernel(nogil=True, error_model=_NUMPY)
def directions(out: Any, first: Any, second: Any, correct_first: Any, correct_second: Any, eps: Any) -> None:
    """Write first / (sqrt(second) + eps), and 0 where the second moment is 0."""
    correct_first, root, eps = _f4(correct_first), _f4(np.sqrt(correct_second)), _f4(eps)
    for i in range(len(out)):
        step = (first[i] / correct_first) / (np.sqrt(second[i]) / root + eps)
        out[i] = step if second[i] != _f4(0) else _f4(0)


@kernel(nogil=True, error_model=_NUMPY)
def advance(
    parameter: Any, first: Any, second: Any, shrink: Any, rate: Any, correct_first: Any, correct_second: Any, eps: Any
) -> None:
    """Replace the parameter by shrink * parameter - rate * direction, without decay in that. See `directions`."""
    correct_first, root, eps = _f4(correct_first), _f4(np.sqrt(correct_second)), _f4(eps)
    shrink, rate = _f4(shrink), _f4(rate)
    for i in range(len(parameter)):
        step = (first[i] / correct_first) / (np.sqrt(second[i]) / root + eps)
        parameter[i] = shrink * parameter[i] - rate * (step if second[i] != _f4(0) else _f4(0))


@kernel(nogil=True)
def add(x: Any, factor: Any, y: Any) -> None:
    """Add factor * y to x."""
    factor = _f4(factor)
    for i in range(len(x)):
        x[i] += factor * y[i]


@kernel(nogil=True, error_model=_NUMPY)
def follow(fresh: Any, first: Any, before: Any, beta1: Any, beta2: Any) -> None:
    """Let the second moment `fresh` follow the gradient that made the first moment what it is of what it was before."""
    rest1, rest2, beta1, beta2 = _f4(1 - beta1), _f4(1 - beta2), _f4(beta1), _f4(beta2)
    for i in range(len(fresh)):
        g = (first[i] - beta1 * before[i]) / rest1
        fresh[i] = beta2 * fresh[i] + rest2 * g * g


@kernel(nogil=True, error_model=_NUMPY)
def _ratios(out: Any, second: Any, fresh: Any, root: Any, fresh_root: Any, eps: Any) -> None:
    for i in range(len(out)):
        ratio = (np.sqrt(second[i]) / root + eps) / (np.sqrt(fresh[i]) / fresh_root + eps)
        out[i] = ratio if second[i] != _f4(0) else _f4(0)


@kernel(nogil=True)
def _greatest(x: Any) -> int:
    found = nb.int32(0)
    for i in range(len(x)):
        found = max(found, x[i])
    return found


@kernel(nogil=True)
def largest_ratio(second: Any, fresh: Any, correct_second: Any, correct_fresh: Any, eps: Any) -> float:
    """Return the largest (sqrt(second) + eps) / (sqrt(fresh) + eps) of elements whose second moment is not 0."""
    root, fresh_root, eps = _f4(np.sqrt(correct_second)), _f4(np.sqrt(correct_fresh)), _f4(eps)
    block = np.empty(_BLOCK, np.float32)
    largest = np.zeros(1, np.int32)
    for start in range(0, len(second), _BLOCK):
        stop = min(len(second), start + _BLOCK)
        ratios = block[: stop - start]
        _ratios(ratios, second[start:stop], fresh[start:stop], root, fresh_root, eps)
        # The bits of floats that are not negative are in the order of these, and integers need no rule for NaN.
        largest[0] = max(largest[0], _greatest(ratios.view(np.int32)))
    return nb.float64(largest.view(np.float32)[0])


@kernel(nogil=True)
def raise_to(second: Any, share: Any) -> None:
    """Raise elements to share times the mean of all that are not 0; those stay 0."""
    total, count = 0.0, 0
    for i in range(len(second)):  # one after another, so that the sum has the same bits on every kind of CPU
        total += nb.float64(second[i])
        count += second[i] != _f4(0)
    least = _f4(share * total / max(1, count))
    for i in range(len(second)):
        if second[i] != _f4(0) and second[i] < least:
            second[i] = least
