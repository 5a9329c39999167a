"""Scaling: multiply arrays of reductions, and return the neutral element of a reduction."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.dtypes import COMPLEX, INTEGERS, NUMPY, Array, name_of


def scale(array: Array, factor: float) -> None:
    """Multiply an array in place: half precision in float32, rounded once; integers in float64, truncated to zero."""
    if factor == 1 or not array.size:
        return
    name = name_of(array.dtype)
    if name in INTEGERS:
        array[...] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    elif name in ("float16", "bfloat16"):
        with np.errstate(over="ignore", invalid="ignore"):
            array[...] = (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)
    else:
        np.multiply(array, array.dtype.type(factor), out=array)


def neutral_element(dtype: str, op: str) -> Any:
    """Return the neutral element of a reduction: it does not change the other ranks' values."""
    if op == "prod":
        return True if dtype == "bool" else 1
    if op in ("min", "max") and dtype not in COMPLEX:
        if dtype == "bool":
            return op == "min"
        if dtype in INTEGERS:
            limits = np.iinfo(NUMPY[dtype])
            return limits.max if op == "min" else limits.min
        return np.inf if op == "min" else -np.inf
    return 0
