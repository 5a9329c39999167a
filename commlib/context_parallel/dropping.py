"""Dropping: which weights of attention are dropped, told by numbers, so that it matters not who computes them. [pure]

A weight is that of a row (an example of the batch, a head and a query) and of a key. Its 32 random bits are a hash of
the call's seed and of these numbers, counted in the whole sequence and among all heads: the same on any number of
ranks, by either method, and where a block is computed once more for its gradients. Integers may be Python's, or
tensors of int64 of any framework, which broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.errors import UsageError

MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0))
"""Shifts that put bits over one another, and factors. Source: Wellons (2018), Prospecting for Hash Functions."""
_BITS, _ODD = (1 << 32) - 1, 0x9E3779B1


def check_rate(what: str, rate: float) -> float:
    """Return the share of weights to be dropped. Raises UsageError for one that is none."""
    if not 0 <= rate < 1:
        raise UsageError(f"{what}: dropout_p is {rate}, expected at least 0, and less than 1")
    return float(rate)


def started(seed: Any, right_shift: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    """Return where the hashes of rows and of keys start, for a seed of 63 bits."""
    low = _mixed((seed & _BITS) ^ _ODD, right_shift)
    high = _mixed((right_shift(seed, 32) & _BITS) ^ low, right_shift)
    return low, _mixed((high + _ODD) & _BITS, right_shift)


def hashed(start: Any, number: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    """Return 32 random bits for a start, such as the hash of other numbers, and a number of 32 bits."""
    return _mixed(start ^ number, right_shift)


def hashed_key(start: Any, key: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    """Return 32 random bits for a key. Never those of a query one by one: a row would meet itself."""
    return _mixed(start ^ ((key * _ODD) & _BITS), right_shift)


def least_kept(rate: float) -> int:
    """Return the least of 32 bits with which a weight is not dropped."""
    return round(rate * (_BITS + 1))


def _mixed(x: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    for shift, factor in MIXING:
        x = x ^ right_shift(x, shift)
        if factor:
            x = (x * factor) & _BITS  # what overflows 64 bits is cut off anyway
    return x
