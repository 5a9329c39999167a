"""Adam's and LAMB's arithmetic on float32, in one pass each and in a fixed order: all ranks get the same bits.

first, second: the moments. correct_first, correct_second: their divisors, which correct their initial zeros.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from commlib.kernels.host.compilation import kernel

_f4 = nb.float32

# Elements whose ratios are in the cache at once.
_BLOCK = 1024

# Division follows IEEE 754. Python's check for a zero divisor would prevent vectorization.
_NUMPY = "numpy"


@kernel(nogil=True)
def accumulate(gradient: Any, first: Any, second: Any, parameter: Any, decay: Any, beta1: Any, beta2: Any) -> None:
    """Update both moments with the gradient + decay * parameter."""
    rest1, rest2 = _f4(1 - beta1), _f4(1 - beta2)
    decay, beta2 = _f4(decay), _f4(beta2)
    for i in range(len(gradient)):
        g = gradient[i] + decay * parameter[i]
        first[i] = first[i] + rest1 * (g - first[i])
        second[i] = beta2 * second[i] + rest2 * g * g


@kernel(nogil=True)
def blend(gradient: Any, first: Any, parameter: Any, decay: Any, beta1: Any, scale: Any) -> None:
    """Replace the gradient by scale times the first moment after an update with gradient + decay * parameter."""
    rest, decay, scale = _f4(1 - beta1), _f4(decay), _f4(scale)
    for i in range(len(gradient)):
        g = gradient[i] + decay * parameter[i]
        gradient[i] = scale * (first[i] + rest * (g - first[i]))


@kernel(nogil=True, error_model=_NUMPY)
def directions(out: Any, first: Any, second: Any, correct_first: Any, correct_second: Any, eps: Any) -> None:
    """Write first / (sqrt(second) + eps), and 0 for elements whose second moment is 0."""
    correct_first, root, eps = _f4(correct_first), _f4(np.sqrt(correct_second)), _f4(eps)
    for i in range(len(out)):
        step = (first[i] / correct_first) / (np.sqrt(second[i]) / root + eps)
        out[i] = step if second[i] != _f4(0) else _f4(0)


@kernel(nogil=True, error_model=_NUMPY)
def advance(
    parameter: Any, first: Any, second: Any, shrink: Any, rate: Any, correct_first: Any, correct_second: Any, eps: Any
) -> None:
    """Replace the parameter by shrink * parameter - rate * direction, as of `directions`, without decay."""
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
    """Update the second moment `fresh` with the gradient that changed the first moment from `before` to `first`."""
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
    result = nb.int32(0)
    for i in range(len(x)):
        result = max(result, x[i])
    return result


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
        # The bits of non-negative floats have the same order as the floats, and integers need no rule for NaN.
        largest[0] = max(largest[0], _greatest(ratios.view(np.int32)))
    return nb.float64(largest.view(np.float32)[0])


@kernel(nogil=True)
def raise_to(second: Any, share: Any) -> None:
    """Raise elements to at least `share` times the mean of all nonzero elements; zeros stay 0."""
    total, count = 0.0, 0
    for i in range(len(second)):  # sequential, so the sum has the same bits on every type of CPU
        total += nb.float64(second[i])
        count += second[i] != _f4(0)
    least = _f4(share * total / max(1, count))
    for i in range(len(second)):
        if second[i] != _f4(0) and second[i] < least:
            second[i] = least
