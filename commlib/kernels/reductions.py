"""Reductions: the compiled function for one dtype and operation. `kernels.host.reduce` describes its arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from commlib.kernels.machine_code import address, entry_point


class ReductionKernel(NamedTuple):
    """A compiled reduction: its address, for other kernels, and the builtin that Python calls."""

    address: int
    call: Callable[..., Any]


@cache
def reduction(dtype: str, operation: str) -> ReductionKernel:
    """Return the reduction for one of sum, mean, prod, min, max (or, and: bool only). The first call loads it."""
    name = reduction_name(dtype, operation)
    return ReductionKernel(address(name), entry_point(name, 7))


def reduction_name(dtype: str, operation: str) -> str:
    """Return the kernel's name."""
    return f"reduce.reduction-{dtype}-{operation}"
