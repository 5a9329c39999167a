"""Dtypes: the dtypes that commlib moves and reduces, by name, and the operations on each."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from commlib.arguments import suggest
from commlib.errors import UsageError

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
OPERATIONS = ("sum", "mean", "min", "max", "prod")
BITWISE = ("and", "or")  # for integers, in addition

NUMPY = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in NUMPY.items()}
KNOWN = frozenset(_NAMES)

# Holds sums of 64-bit integers that may need 128 bits: see `kernels.host.exact_mean`. Internal: users never see it.
HALVES = "halves"
WORKING = {**NUMPY, HALVES: np.dtype([("high", np.int64), ("low", np.int64)])}
"""All dtypes, including those of partial results."""

# On bools a sum is "any" and a product is "all".
_LOGICAL = {"sum": "or", "max": "or", "prod": "and", "min": "and"}


def name_of(dtype: Any) -> str:
    """Return commlib's name of a dtype, or of anything that numpy converts to one. Raises UsageError."""
    if isinstance(dtype, str) and dtype in NUMPY:
        return dtype
    try:
        return _NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise UsageError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}") from None


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype (ml_dtypes' for bfloat16) of a name or dtype. Raises UsageError."""
    return NUMPY[name_of(dtype)]


def kernel_operation(dtype: str, operation: str) -> str:
    """Return the kernels' name of `operation` on `dtype`. Raises UsageError where it is undefined."""
    if operation in BITWISE and dtype in INTEGERS:
        return operation
    if operation not in OPERATIONS:
        if operation in BITWISE:
            instead = {"and": "'min' (all)", "or": "'max' (any)"}[operation]
            raise UsageError(f"operation {operation!r} is for integers, not for {dtype}; for bool pass {instead}")
        if isinstance(core := getattr(operation, "core", None), str):  # a ReduceOp of Horovod's API
            raise UsageError(f"operation {operation!r} is for operations by name, such as allreduce: pass {core!r}")
        raise UsageError(
            f"unknown operation {operation!r}; known are {', '.join(OPERATIONS)}{suggest(operation, OPERATIONS)}"
        )
    if dtype == "bool":
        if operation == "mean":
            raise UsageError("the mean of bool arrays is not defined: cast them, or use 'max' (any) or 'min' (all)")
        return _LOGICAL[operation]
    if dtype in COMPLEX and operation in ("min", "max"):
        raise UsageError(f"operation {operation!r} is not defined for {dtype}: complex numbers have no order")
    return operation


def accumulator_dtype(dtype: str, operation: str) -> str:
    """Return the dtype in which `operation` on `dtype` accumulates before it is rounded, once, to `dtype`.

    Half precision accumulates in float32. The mean of integers accumulates in 64 bits (64-bit integers: 128), where
    their sum cannot wrap around.
    """
    if dtype in ("float16", "bfloat16"):
        return "float32"
    if operation == "mean" and dtype in ("int64", "uint64"):
        return HALVES
    if operation == "mean" and "int" in dtype:
        return "uint64" if dtype.startswith("u") else "int64"
    return dtype


Array = npt.NDArray[Any]
