"""Shard sharing: ranks with the same piece of a weight, e.g. if there are fewer heads of keys and values than ranks."""

from __future__ import annotations

from itertools import groupby

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding

Sharers = tuple[tuple[int, ParallelAxis | None], ...]
"""The lengths of pieces of a weight on this rank, and for each the axis of the ranks that share it, or None."""


def sharers_of(axis: ParallelAxis, sharding: Sharding) -> Sharers:
    """Return the ranks that share each piece of a weight with this rank; () if there are none. Collective."""
    alike = groupby(sharding.sharing(axis.rank, axis.size), key=lambda part: part[0])  # K and V have one reduction
    totals = [(copies, sum(last - first for _, first, last in parts)) for copies, parts in alike]
    if totals[0][0] == 1 and len(totals) == 1:
        return ()
    return tuple((length, axis.sharers(copies) if copies > 1 else None) for copies, length in totals)
