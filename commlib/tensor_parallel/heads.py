"""Heads: how those of queries, and those of keys and values that serve them, are divided among ranks. [pure]"""

from __future__ import annotations


def units_of_queries(queries: int, keys: int, size: int) -> int:
    """Return in which units heads of queries are divided among `size` ranks, each beside its head of keys and values.

    Groups of queries with one head of keys stay whole where there is one for each rank. Keys that are fewer, and divide
    the number of ranks, are shared: as many ranks have one, each with some of its queries. 0 if neither goes.
    """
    if keys >= size:
        return keys
    goes_up = queries % size == 0 or keys == 1
    return queries if size % keys == 0 and queries >= size and goes_up else 0
