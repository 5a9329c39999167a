"""Dispatch plan of one call in device memory: the indices that send tokens to experts and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments
from commlib.expert.placement import ExpertPlacement
from commlib.expert.stream_alloc import stream_alloc
from commlib.kernels.host.row_exchange import count_moved_rows, order_numbers, take_moved_rows, write_places


@dataclass(frozen=True, slots=True)
class DeviceDispatchPlan:
    """Output of `commlib.kernels.host.row_exchange.write_places`, all int32.

    starts: the start of each token's rows in `members`, and their total. sends, takes: number of rows sent to each rank
    and received from it, except this rank.
    """

    sent: DeviceArray
    came: DeviceArray
    returned: DeviceArray
    found: DeviceArray
    members: DeviceArray
    starts: DeviceArray
    sends: list[int]
    takes: list[int]


class DevicePlanBuilder:
    """Makes dispatch plans. comm: see `commlib.expert.device_dispatcher.DeviceDispatcher`."""

    def __init__(self, comm: Communicator, placement: ExpertPlacement) -> None:
        self._comm = comm
        self._owners, self._order = (np.array(each, np.int32) for each in (placement.owners, placement.order))
        self._own = np.array(placement.of_rank(comm.rank), np.int64)

    def make(
        self, x: DeviceArray, counts: Array, assigned: Assignments, gates: Array
    ) -> tuple[DeviceDispatchPlan, DeviceArray, Array]:
        """Return a plan, the gates of the received rows, and the number of rows for each expert here (int32).

        counts: assignments of all ranks, int64 [ranks, experts]. gates: float32, on the host. They are exchanged
        between hosts, and go to the device of `x` together with the plan, in one queued copy. Collective.
        """
        comm, order, owners, rank = self._comm, self._order, self._owners, self._comm.rank
        local, number = counts[:, self._own].sum(0), len(assigned.tokens)
        sends, takes = np.empty(comm.size, np.int64), np.empty(comm.size, np.int64)
        count_moved_rows(counts, owners, rank, sends, takes)
        going, coming, here = int(sends.sum()), int(takes.sum()), int(local.sum())
        ends = list(accumulate((going, here, coming, number, number, len(assigned.starts), here), initial=0))
        block = x.device.staging(4 * ends[-1]).view(np.int32)
        sent, came, returned, found, members, starts, row_gates = _cut(block, ends)
        tokens, slots = assigned.tokens, assigned.slots
        write_places(counts, order, owners, rank, tokens, slots, sent, came, returned, found, members)
        starts[:] = assigned.starts
        heard = told = np.empty(going, np.float32)
        take_moved_rows(counts, order, owners, rank, gates, told)
        if comm.size > 1:
            heard, _ = comm.all_to_all_v(told, sends.tolist(), takes=takes.tolist())
        order_numbers(found, returned, gates, heard, row_gates.view(np.float32))
        there = stream_alloc(x, (ends[-1],), np.int32)
        x.device.copy(there, block)
        sent, came, returned, found, members, starts, row_gates = _cut(there, ends)
        passage = DeviceDispatchPlan(sent, came, returned, found, members, starts, sends.tolist(), takes.tolist())
        return passage, row_gates.view(np.float32), local.astype(np.int32)


def _cut(x: Any, ends: list[int]) -> list[Any]:
    return [x[start:stop] for start, stop in pairwise(ends)]
