"""Clip gradients by their global norm, with the same bits on all ranks.

`sum_of_squares` adds squares in a fixed order. Ranks with the same gradients therefore scale them by the same factor,
even on different CPUs, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from commlib.communicator import Communicator
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.norm import sum_of_squares


def check_limit(call: str, argument: str, limit: float) -> float:
    """Return the largest allowed norm, as a float. Raises UsageError if it is negative or NaN."""
    try:
        is_right = bool(limit >= 0)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise UsageError(f"{call}: {argument} must be a non-negative number, got {limit!r}")
    return float(limit)


def check_norm_type(call: str, norm_type: float) -> float:
    """Return the norm type as a float; math.inf is the maximum norm. Raises UsageError for an invalid type."""
    if not norm_type > 0:
        raise UsageError(f"{call}: norm_type must be a number above 0, or inf, got {norm_type}")
    return float(norm_type)


def check_finite(call: str, norm: float) -> None:
    """Raise UsageError for a norm that is not finite."""
    if not math.isfinite(norm):
        raise UsageError(f"{call}: the norm of the gradients of all stages is {norm}, and error_if_nonfinite is set")


def norm_of_powers(powers: Iterable[float], norm_type: float) -> float:
    """Return the norm for sums of powers; for the norm inf, for largest magnitudes."""
    if norm_type == math.inf:
        return float(np.max([0.0, *powers]))  # NaN if one of them is NaN
    return math.sqrt(sum(powers)) if norm_type == 2 else float(sum(powers)) ** (1 / norm_type)


def norm_of(squares: Iterable[float]) -> float:
    """Return the 2-norm for sums of squares."""
    return math.sqrt(sum(squares))


def norm_of_arrays(arrays: Iterable[Array], comms: Iterable[Communicator | None] | None = None) -> float:
    """Return the 2-norm of contiguous float arrays together. comms: per array, the ranks that hold its other shards.

    Collective over these ranks. Raises UsageError for other dtypes.
    """
    squares = [sum_of_squares(array.reshape(-1)) for array in arrays]
    return math.sqrt(sum_over_axes(zip(comms or repeat(None), squares, strict=False)))


def clip_factor(norm: float, limit: float, *, epsilon: float = 0.0, infinite_is_nan: bool = False) -> float:
    """Return the factor that scales gradients of this norm to `limit`; 1 if they are below it.

    `epsilon` is added to the norm before the division. A NaN norm gives NaN; an infinite norm gives 0, or NaN if
    `infinite_is_nan`.
    """
    divisor = math.nan if infinite_is_nan and math.isinf(norm) else norm + epsilon
    return 1.0 if divisor <= limit and math.isfinite(divisor) else limit / divisor


def power_over_axes(powers: Iterable[tuple[Communicator | None, float]], norm_type: float) -> float:
    """Return the sum of powers over all shards, or the largest magnitude for the norm inf. Collective."""
    return largest_over_axes(powers) if norm_type == math.inf else sum_over_axes(powers)


def largest_over_axes(largest: Iterable[tuple[Communicator | None, float]]) -> float:
    """Return the largest magnitude over all shards. Arguments as for `sum_over_axes`. Collective."""
    values = list(largest)
    comms = {id(comm): comm for comm, _ in values if comm is not None}
    own = float(np.max([0.0, *(value for _, value in values)]))
    for comm in comms.values():
        own = float(np.max(comm.all_gather(np.array([own]))))
    return own


def sum_over_axes(squares: Iterable[tuple[Communicator | None, float]]) -> float:
    """Return the sum of squares of arrays; some are sharded over the ranks of an axis. Collective.

    squares: (ranks, sum of squares) pairs. `ranks` hold the other shards; None marks an array that every rank has in
    full, which counts once. Ranks of one axis list it in the same order.
    """
    whole, parts = 0.0, dict[int, tuple[Communicator, float]]()
    for comm, square in squares:
        if comm is None:
            whole += square
        else:
            parts[id(comm)] = comm, parts.get(id(comm), (comm, 0.0))[1] + square
    return sum((float(comm.all_reduce(np.array([square]))[0]) for comm, square in parts.values()), whole)
