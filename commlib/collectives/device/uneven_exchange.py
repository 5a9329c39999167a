"""Uneven exchanges between the devices of a node: ranks exchange the row counts on the host, then queue the copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.collectives.device.call import InnerCall
from commlib.collectives.device.peers import DevicePeers
from commlib.collectives.host.gathering import gather_counts
from commlib.collectives.operands import Result, allocate_like
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.node.collective import NOTHING, Exchange, ranges
from commlib.node.device_collective import exchange
from commlib.schedule.layout import uneven


@dataclass(frozen=True, slots=True)
class NodeExchange:
    """Runs `between` if the node's devices can be connected, within a call `text` of all ranks, else `otherwise`."""

    peers: DevicePeers
    text: str
    between: InnerCall
    otherwise: InnerCall

    def perform(self, x: Any, target: Any) -> Any:
        call = self.otherwise if self.peers.open(self.text) is None else self.between
        return call.perform(x, target)


@dataclass(frozen=True, slots=True)
class RowGather:
    """Gathers the rows of all ranks between the devices of a node."""

    peers: DevicePeers
    text: str

    def perform(self, x: Any, target: Any) -> Any:
        return self.peers.group.calls.perform(self.text, gather_rows, self.peers, self.text, x)


def gather_rows(peers: DevicePeers, text: str, x: DeviceArray) -> Any:
    """Gather the rows of all ranks within an operation; return the new array."""
    group = peers.group
    lengths = gather_counts(group, text, np.array([len(x)], np.int64)).tolist()
    gathered, given = allocate_like(x, (sum(lengths), *x.shape[1:]))
    row = math.prod(x.shape[1:])
    longest = max(lengths) * row * x.itemsize
    takes = ranges(uneven(length * row for length in lengths), x.itemsize)
    what = Exchange([(0, x.nbytes)], takes, longest, [0] * group.size, longest)
    exchange(*peers.opened(), what, None, again=False)(x.reshape(-1), gathered.reshape(-1), group.waits.watch(text))
    return given


def exchange_rows(
    peers: DevicePeers,
    text: str,
    x: DeviceArray,
    splits: Sequence[int],
    takes: Sequence[int] | None,
    out: Result | None,
) -> tuple[Any, Array]:
    """Exchange rows within an operation; return the new array (None if `out` was given) and the rows from each rank.

    takes: the expected rows from each rank, if known. If the counts differ, or the rows do not fit into `out`, this
    rank copies nothing; the other ranks still get their rows.
    """
    group = peers.group
    rank, size = group.rank, group.size
    row = math.prod(x.shape[1:])
    counts = gather_counts(group, text, np.array(splits, np.int64)).reshape(size, size)
    received = counts[:, rank]
    fits = takes is None or received.tolist() == list(takes)
    if out is not None:
        fits &= out.array.shape[0] == received.sum()
        target, result = out.array, None
    else:
        target, result = allocate_like(x, (int(received.sum()), *x.shape[1:]))
    longest = int(counts.max(initial=0)) * row * x.itemsize
    sends = ranges(uneven(int(count) * row for count in splits), x.itemsize)
    into = ranges(uneven(int(count) * row for count in received), x.itemsize) if fits else [NOTHING] * size
    before = counts[:, :rank].sum(axis=1) * row * x.itemsize  # each source begins with the rows for lower ranks
    what = Exchange(sends, into, longest, before.tolist(), size * longest)
    exchange(*peers.opened(), what, None, again=False)(x.reshape(-1), target.reshape(-1), group.waits.watch(text))
    return result, received.copy()
