"""Uneven exchanges between the devices of a node: ranks exchange the row counts on the host, then queue the copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.node import DevicePeers
from commlib.collectives.device.staging_queue import OnWait, StagingQueue
from commlib.collectives.host.gathering import gather_counts
from commlib.collectives.operands import Result, allocate_like
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, ranges
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import OpenSlots, exchange
from commlib.schedule.layout import uneven
from commlib.transport.base import WaitHook


def run_between_devices(
    peers: DevicePeers,
    station: StagingQueue,
    text: str,
    move: Callable[[DeviceArray, OnWait], Any],
    otherwise: DeviceCall,
) -> DeviceCall:
    """Return a call that runs `move` if the devices of the node are connected, else `otherwise`."""

    def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
        if peers.open(text, on_wait) is None:
            return otherwise.run_in(x, target, on_wait)
        return move(x, on_wait)

    return DeviceCall(peers.group.progress, text, station, run)


def gather_rows(
    board: DeviceBoard, open_slots: OpenSlots, group: Group, text: str, x: DeviceArray, on_wait: WaitHook
) -> Any:
    """Gather the rows of all ranks within an operation; return the new array."""
    lengths = gather_counts(group, text, np.array([len(x)], np.int64)).tolist()
    gathered, given = allocate_like(x, (sum(lengths), *x.shape[1:]))
    row = math.prod(x.shape[1:])
    longest = max(lengths) * row * x.itemsize
    takes = ranges(uneven(length * row for length in lengths), x.itemsize)
    what = Exchange([(0, x.nbytes)], takes, longest, [0] * group.size, longest)
    exchange(board, open_slots, what, None, again=False)(x.reshape(-1), gathered.reshape(-1), on_wait)
    return given


def exchange_rows(
    board: DeviceBoard,
    open_slots: OpenSlots,
    group: Group,
    text: str,
    x: DeviceArray,
    splits: Sequence[int],
    takes: Sequence[int] | None,
    out: Result | None,
    on_wait: WaitHook,
) -> tuple[Any, Array]:
    """Exchange rows within an operation; return the new array (None if `out` was given) and the rows from each rank.

    takes: the expected rows from each rank, if known. If the counts differ, or the rows do not fit into `out`, this
    rank copies nothing; the other ranks still get their rows.
    """
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
    exchange(board, open_slots, what, None, again=False)(x.reshape(-1), target.reshape(-1), on_wait)
    return result, received.copy()
