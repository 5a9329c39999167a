"""Overlap: decide whether to run reductions during backward."""

from __future__ import annotations

import os
from typing import Any


def overlap_pays(comm: Any, *, threads: int, cores: int) -> bool:
    """Return whether to launch buckets while backward runs. Collective on the first call.

    Overlap pays if ranks wait for a network, or if each rank has more `cores` than training `threads`. If every core is
    busy, a reduction within a node takes cores and memory bandwidth from backward: in measurements it then cost 2 to 8
    % of a step and hid nothing.
    """
    ranks = comm.node().size
    return bool(ranks < comm.size or cores > threads)


def cores_per_rank(comm: Any) -> int:
    """Return the number of cores for this rank: the cores it is bound to, or its share of the node's cores."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return mine if mine < all_cores else all_cores // int(comm.runtime.ranks_on_node)
