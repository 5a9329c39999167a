"""Numbers: give whole numbers that combine exactly in every dtype, so that every element is right or wrong.

They repeat with a prime period, so that a whole array is given by one short table, and data that arrives at the wrong
place, from the wrong rank or in the wrong block differs from what it should be. Half precision and 8-bit integers hold
few whole numbers: there the numbers are as small as the number of ranks demands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import COMPLEX, NUMPY, Array

PERIOD = 113  # the greatest prime whose residues int8 holds
_GREATEST = {"int8": 127, "uint8": 255, "bfloat16": 256, "float16": 2048}  # up to here all whole numbers are exact
_MOST_FACTORS = 6  # 2 to this power is still an int8


def _residues(rank: int, block: int) -> Any:
    return (np.arange(PERIOD) + 31 * rank + 7 * block) % PERIOD


def _as_dtype(numbers: Any, dtype: str) -> Array:
    if dtype == "bool":
        return np.asarray(numbers % 2 == 1)
    if dtype in COMPLEX:
        numbers = numbers * (1 + 2j)
    return np.asarray(numbers.astype(NUMPY[dtype]))


def moved(dtype: str, source: int, target: int) -> Array:
    """Return one period of what rank `source` sends to rank `target`."""
    return _as_dtype(_residues(source, target), dtype)


def given(dtype: str, op: str, rank: int, size: int, block: int = 0) -> Array:
    """Return one period of what `rank` gives to a reduction, in the block of that number."""
    numbers = _residues(rank, block)
    if dtype == "bool":
        # One rank decides each element, and none a few: another one cannot hide what it does wrong.
        decides = (np.arange(PERIOD) + 7 * block) % PERIOD % (size + 1) == rank if size < PERIOD else numbers == 0
        return np.asarray(decides if op in ("sum", "max") else ~decides)
    if op in ("sum", "mean"):
        greatest = min(16, _GREATEST.get(dtype, 1 << 15) // size)
        # More ranks than exact numbers: each gives a one in one place of the period.
        numbers = numbers % (greatest + 1) if greatest else (numbers == 0).astype(int)
    elif op == "prod":
        turns = -(-size // PERIOD)  # how many ranks share a residue
        factors = numbers % 2 if size <= _MOST_FACTORS else numbers < max(1, _MOST_FACTORS // turns)
        return np.asarray((1 + factors * (1j if dtype in COMPLEX else 1)).astype(NUMPY[dtype]))
    return _as_dtype(numbers, dtype)


def combined(dtype: str, op: str, size: int, block: int = 0) -> Array:
    """Return one period of the combination of what all ranks give; computed wide, so that nothing is rounded."""
    tables = np.stack([given(dtype, op, rank, size, block) for rank in range(size)])
    if dtype == "bool":
        return np.asarray(tables.any(0) if op in ("sum", "max") else tables.all(0))
    if op in ("min", "max"):
        return np.asarray(getattr(tables.astype(np.float64), op)(0).astype(NUMPY[dtype]))
    kind = tables.dtype.kind
    wide = tables.astype(np.complex128 if kind == "c" else np.int64 if kind in "iu" else np.float64)
    total = wide.prod(0) if op == "prod" else wide.sum(0)
    if op == "mean":
        total = total // size if kind in "iu" else (total.view(np.float64) / size).view(total.dtype)
    if dtype in ("float16", "bfloat16"):
        total = total.astype(np.float32)  # a mean is rounded there once, and then to half precision
    return np.asarray(total.astype(NUMPY[dtype]))
