"""Sharers: the ranks that have the same part of a weight, such as heads of keys and values that are fewer than they."""

from __future__ import annotations

from itertools import groupby

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding

Sharers = tuple[tuple[int, Axis | None], ...]
"""The lengths of parts of a weight on this rank, and the ranks that share each with it, if any do."""


def sharers_of(axis: Axis, sharding: Sharding) -> Sharers:
    """Return which ranks have the same of each part of a weight as this one; () if none has. Collective."""
    alike = groupby(sharding.sharing(axis.rank, axis.size), key=lambda part: part[0])  # K and V have one reduction
    found = [(copies, sum(last - first for _, first, last in parts)) for copies, parts in alike]
    if found[0][0] == 1 and len(found) == 1:
        return ()
    return tuple((length, axis.sharers(copies) if copies > 1 else None) for copies, length in found)
