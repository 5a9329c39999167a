"""Attention dropout: choose dropped weights by hashing their position, independent of rank and method. [pure]

A weight belongs to a row (an example of the batch, a head and a query) and to a key. Its 32 random bits are a hash of
the call's seed and of these numbers, counted in the full sequence and among all heads: the same on any number of
ranks, by either method, and when a block is recomputed for its gradients. Integers may be Python's, or tensors of
int64 of any framework, which broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.errors import UsageError

MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0))
"""Right shifts and factors of a bit mixer. Source: Wellons (2018), Prospecting for Hash Functions."""
_BITS, _ODD = (1 << 32) - 1, 0x9E3779B1


def check_rate(what: str, rate: float) -> float:
    """Return the share of weights to drop. Raises UsageError if it is invalid."""
    if not 0 <= rate < 1:
        raise UsageError(f"{what}: dropout_p is {rate}, expected at least 0, and less than 1")
    return float(rate)


def start_hashes(seed: Any, right_shift: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    """Return the initial states for the hashes of rows and of keys, for a seed of 63 bits."""
    low = _mix((seed & _BITS) ^ _ODD, right_shift)
    high = _mix((right_shift(seed, 32) & _BITS) ^ low, right_shift)
    return low, _mix((high + _ODD) & _BITS, right_shift)


def hash_number(start: Any, number: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    """Return 32 random bits for a state, such as the hash of other numbers, and a number of 32 bits."""
    return _mix(start ^ number, right_shift)


def hash_key(start: Any, key: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    """Return 32 random bits for a key, unlike those of a query of the same number: equal bits would cancel."""
    return _mix(start ^ ((key * _ODD) & _BITS), right_shift)


def keep_threshold(rate: float) -> int:
    """Return the smallest of the 32-bit numbers with which a weight is kept."""
    return round(rate * (_BITS + 1))


def _mix(x: Any, right_shift: Callable[[Any, int], Any]) -> Any:
    for shift, factor in MIXING:
        x = x ^ right_shift(x, shift)
        if factor:
            x = (x * factor) & _BITS  # overflow beyond 64 bits is cut off anyway
    return x
