"""Gathering: concatenate all ranks' arrays of any lengths, within another operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.host.schedule_path import own_program
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective, ranges
from commlib.schedule.layout import uneven


def gather_parts(group: Group, text: str, x: Any, whole: Any, counts: Sequence[int]) -> None:
    """Gather contiguous arrays into `whole`; rank r contributes `counts[r]` elements."""
    layout, flat = uneven(counts), whole.reshape(-1)
    if group.shares_memory and type(whole) is not DeviceArray:
        exchange = Exchange([(0, x.nbytes)], ranges(layout, x.itemsize), max(layout.counts) * x.itemsize)
        NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(x), address_of(flat))
        return
    start, stop = layout.slice_of(group.rank)
    flat[start:stop] = x.reshape(-1)
    group.programs.execute(own_program(group, "all_gather", "ring"), [[Region(flat, layout)]], text, part=1)


def gather_counts(group: Group, text: str, counts: Array) -> Array:
    """Return all ranks' int64 counts, concatenated; every rank passes the same number of them."""
    whole = np.empty(group.size * len(counts), np.int64)
    layout = uneven([len(counts)] * group.size)
    if group.shares_memory:
        exchange = Exchange([(0, counts.nbytes)], ranges(layout, 8), counts.nbytes)
        NodeCollective.exchange(group.open(), text, exchange).run_at(address_of(counts), address_of(whole))
        return whole
    start, stop = layout.slice_of(group.rank)
    whole[start:stop] = counts
    group.programs.execute(own_program(group, "all_gather", "bruck"), [[Region(whole, layout)]], text)
    return whole
