"""Overlap: decide whether reductions run during backward."""

from __future__ import annotations

import os
from typing import Any


def overlap_pays(comm: Any, *, threads: int, cores: int) -> bool:
    """Tell whether buckets should be launched while backward runs. Collective when first called.

    They should where a network is waited for, and where each rank has more `cores` than `threads` that train. With
    every core busy a reduction within a node takes cores and memory from backward itself: it was measured to cost 2 to
    8 % of a step then, and to hide nothing.
    """
    ranks = comm.node().size
    return bool(ranks < comm.size or cores > threads)


def cores_per_rank(comm: Any) -> int:
    """Return how many cores this rank has for itself: those it is bound to, or its share of the node's."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return mine if mine < all_cores else all_cores // int(comm.runtime.ranks_on_node)
