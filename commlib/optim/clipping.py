"""Clip by the norm of all gradients together, with the same bits on all ranks.

Squares are added by `sum_of_squares` in an order of their own, so ranks that have the same gradients scale them alike
even where their CPUs differ, and none waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host.norm import sum_of_squares


def check_limit(call: str, argument: str, limit: float) -> float:
    """Return the largest norm that is allowed, as a float. Raises UsageError if it is negative or NaN."""
    if not limit >= 0:
        raise UsageError(f"{call}: {argument} must be a number that is not negative, got {limit}")
    return float(limit)


def check_norm_type(call: str, norm_type: float) -> float:
    """Return which norm is meant, as a float; math.inf is the largest. Raises UsageError if there is no such norm."""
    if not norm_type > 0:
        raise UsageError(f"{call}: norm_type must be a number above 0, or inf, got {norm_type}")
    return float(norm_type)


def check_finite(call: str, norm: float) -> None:
    """Raise UsageError for a norm that is not finite."""
    if not math.isfinite(norm):
        raise UsageError(f"{call}: the norm of the gradients of all stages is {norm}, and error_if_nonfinite is set")


def norm_of_powers(powers: Iterable[float], norm_type: float) -> float:
    """Return the norm of everything whose sums of powers are given, or, of the norm inf, whose largest ones are."""
    if norm_type == math.inf:
        return float(np.max([0.0, *powers]))  # NaN, if one is
    return math.sqrt(sum(powers)) if norm_type == 2 else float(sum(powers)) ** (1 / norm_type)


def norm_of(squares: Iterable[float]) -> float:
    """Return the 2-norm of everything whose sums of squares are given."""
    return math.sqrt(sum(squares))


def norm_of_arrays(arrays: Iterable[Array], comms: Iterable[Communicator | None] | None = None) -> float:
    """Return the 2-norm of contiguous arrays of floats together. comms: of each, the ranks that have its other parts.

    Collective over these. Raises UsageError for other dtypes.
    """
    squares = [sum_of_squares(array.reshape(-1)) for array in arrays]
    return math.sqrt(sum_over_axes(zip(comms or repeat(None), squares, strict=False)))


def clip_factor(norm: float, limit: float, *, epsilon: float = 0.0, infinite_is_nan: bool = False) -> float:
    """Return what scales gradients of this norm to `limit`; 1 where they are below it.

    `epsilon` is added to the norm before it divides. A norm that is NaN scales by NaN; an infinite one by 0, or by NaN
    if `infinite_is_nan`.
    """
    divisor = math.nan if infinite_is_nan and math.isinf(norm) else norm + epsilon
    return 1.0 if divisor <= limit and math.isfinite(divisor) else limit / divisor


def power_over_axes(powers: Iterable[tuple[Communicator | None, float]], norm_type: float) -> float:
    """Return the sum of powers of everything, or, of the norm inf, its largest, as `sum_over_axes` does. Collective."""
    return largest_over_axes(powers) if norm_type == math.inf else sum_over_axes(powers)


def largest_over_axes(largest: Iterable[tuple[Communicator | None, float]]) -> float:
    """Return the largest of everything, given as to `sum_over_axes`. Collective."""
    given = list(largest)
    comms = {id(comm): comm for comm, _ in given if comm is not None}
    own = float(np.max([0.0, *(value for _, value in given)]))
    for comm in comms.values():
        own = float(np.max(comm.all_gather(np.array([own]))))
    return own


def sum_over_axes(squares: Iterable[tuple[Communicator | None, float]]) -> float:
    """Return the sum of squares of everything, where some of it is divided among the ranks of an axis. Collective.

    squares: sums of squares, each with the ranks that have the other parts, or None for what every rank has as a
    whole, which counts once. Ranks of one axis name it in the same order.
    """
    whole, parts = 0.0, dict[int, tuple[Communicator, float]]()
    for comm, square in squares:
        if comm is None:
            whole += square
        else:
            parts[id(comm)] = comm, parts.get(id(comm), (comm, 0.0))[1] + square
    return sum((float(comm.all_reduce(np.array([square]))[0]) for comm, square in parts.values()), whole)
