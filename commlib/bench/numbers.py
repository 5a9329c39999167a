"""Numbers: whole numbers that combine exactly in every dtype, so that every element is either right or wrong.

They repeat with a prime period, so that one short table describes an array, and data from the wrong rank or block, or
at the wrong offset, differs from the expected data. Half precision and 8-bit integers represent few whole numbers
exactly: for them the numbers get smaller as the number of ranks grows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import COMPLEX, NUMPY, Array

PERIOD = 113  # the largest prime whose residues fit into int8
_GREATEST = {"int8": 127, "uint8": 255, "bfloat16": 256, "float16": 2048}  # all whole numbers up to these are exact
_MOST_FACTORS = 6  # 2 to this power fits into int8


def _residues(rank: int, block: int) -> Any:
    return (np.arange(PERIOD) + 31 * rank + 7 * block) % PERIOD


def _as_dtype(numbers: Any, dtype: str) -> Array:
    if dtype == "bool":
        return np.asarray(numbers % 2 == 1)
    if dtype in COMPLEX:
        numbers = numbers * (1 + 2j)
    return np.asarray(numbers.astype(NUMPY[dtype]))


def exchange_input(dtype: str, source: int, target: int) -> Array:
    """Return one period of the data that rank `source` sends to rank `target`."""
    return _as_dtype(_residues(source, target), dtype)


def reduction_input(dtype: str, op: str, rank: int, size: int, block: int = 0) -> Array:
    """Return one period of the data that `rank` contributes to a reduction, in the given block."""
    numbers = _residues(rank, block)
    if dtype == "bool":
        # Each element is decided by one rank, or by none: no other rank can hide an error.
        decides = (np.arange(PERIOD) + 7 * block) % PERIOD % (size + 1) == rank if size < PERIOD else numbers == 0
        return np.asarray(decides if op in ("sum", "max") else ~decides)
    if op in ("sum", "mean"):
        greatest = min(16, _GREATEST.get(dtype, 1 << 15) // size)
        # More ranks than exact numbers: each contributes a one at one position of the period.
        numbers = numbers % (greatest + 1) if greatest else (numbers == 0).astype(int)
    elif op == "prod":
        turns = -(-size // PERIOD)  # the number of ranks that share a residue
        factors = numbers % 2 if size <= _MOST_FACTORS else numbers < max(1, _MOST_FACTORS // turns)
        return np.asarray((1 + factors * (1j if dtype in COMPLEX else 1)).astype(NUMPY[dtype]))
    return _as_dtype(numbers, dtype)


def reduction_result(dtype: str, op: str, size: int, block: int = 0, first: int | None = None) -> Array:
    """Return one period of the combination of all ranks' data; computed in a wide dtype, so that nothing is rounded.

    first: the number of first ranks to combine instead, in a scan.
    """
    ranks = range(size if first is None else first)
    tables = np.stack([reduction_input(dtype, op, rank, size, block) for rank in ranks])
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
        total = total.astype(np.float32)  # commlib rounds a mean once to float32, and then to half precision
    return np.asarray(total.astype(NUMPY[dtype]))
