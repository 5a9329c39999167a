"""The norm of gradients that all ranks have, with the same bits on all of them, at 1/P of the work.

If every rank took the norm of everything, sums would be added in an order that depends on the CPU's vectors, and ranks
on different CPUs would scale by factors that differ in the last bit: their parameters would part. So each takes the
squares of its share, and the sum of the shares is the same on all.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from commlib.errors import MismatchError

# Added to the norm before it divides, as torch does.
_EPSILON = 1e-6

Squares = Callable[[int, int, int], float]
"""Returns the sum of squares of gradient i's elements from a start to a stop."""


class Sums(Protocol):
    """What is needed of a communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Any, op: str = ..., *, out: Any = ...) -> Any: ...


def global_norm(comm: Sums, counts: Sequence[int], squares: Squares) -> float:
    """Return the 2-norm of gradients with these numbers of elements, of which all ranks have the same. Collective.

    It is not finite if an element is not. Raises MismatchError on every rank if ranks have other numbers of elements.
    """
    # Small enough that sums of its squares over ranks are exact: they tell whether all ranks have the same one.
    digest = float(zlib.crc32(np.asarray(counts, np.int64).tobytes()) >> 16)
    share = _share(comm.rank, comm.size, counts)
    table = np.array([sum(squares(*piece) for piece in share), digest, digest * digest], np.float64)
    if comm.size > 1:
        comm.all_reduce(table, "sum", out=table)
        if table[1] * table[1] != comm.size * table[2]:
            raise MismatchError(
                "clip_grad_norm: ranks have gradients of different numbers of elements; reduce gradients first, so "
                f"that all ranks have the same (rank {comm.rank} has {len(counts)} with {sum(counts)} elements)"
            )
    return math.sqrt(table[0])


def clip_factor(norm: float, max_norm: float) -> float:
    """Return what to multiply gradients by, so that their norm is `max_norm` at most; NaN for a norm of NaN."""
    factor = max_norm / (norm + _EPSILON)
    return 1.0 if factor > 1 else factor


def _share(rank: int, size: int, counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the pieces (gradient, start, stop) that make up a rank's equal part of all elements."""
    total = sum(counts)
    first, last = total * rank // size, total * (rank + 1) // size
    pieces, begin = [], 0
    for index, count in enumerate(counts):
        start, stop = max(first - begin, 0), min(last - begin, count)
        if start < stop:
            pieces.append((index, start, stop))
        begin += count
    return pieces
