"""Dispatch plan of one call in device memory: the indices that send tokens to experts and back, also as one array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_host
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments
from commlib.expert.placement import ExpertPlacement
from commlib.kernels.host.row_exchange import count_moved_rows, order_numbers, take_moved_rows, write_places


@dataclass(frozen=True, slots=True)
class DeviceDispatchPlan:
    """Output of `commlib.kernels.host.row_exchange.write_places`, all int32.

    starts: the start of each token's rows in `members`, and their total. sends, takes: number of rows sent to each rank
    and received from it, except this rank.
    """

    sent: DeviceArray
    received: DeviceArray
    returned: DeviceArray
    positions: DeviceArray
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
        sent, received, returned, positions, members, starts, row_gates = _cut(block, ends)
        tokens, slots = assigned.tokens, assigned.slots
        write_places(counts, order, owners, rank, tokens, slots, sent, received, returned, positions, members)
        starts[:] = assigned.starts
        received_gates = sent_gates = np.empty(going, np.float32)
        take_moved_rows(counts, order, owners, rank, gates, sent_gates)
        if comm.size > 1:
            received_gates, _ = comm.all_to_all_v(sent_gates, sends.tolist(), takes=takes.tolist())
        order_numbers(positions, returned, gates, received_gates, row_gates.view(np.float32))
        there = stream_alloc(x, (ends[-1],), np.int32)
        x.device.copy(there, block)
        sent, received, returned, positions, members, starts, row_gates = _cut(there, ends)
        plan = DeviceDispatchPlan(sent, received, returned, positions, members, starts, sends.tolist(), takes.tolist())
        return plan, row_gates.view(np.float32), local.astype(np.int32)


def _cut(x: Any, ends: list[int]) -> list[Any]:
    return [x[start:stop] for start, stop in pairwise(ends)]


_ARRAYS = 6


def pack_device_plan(plan: DeviceDispatchPlan) -> DeviceArray:
    """Return a plan as bytes (uint8) on its device, for frameworks whose graphs carry only tensors.

    sent | received | returned | positions | members | starts | sends, takes, and the lengths of the arrays before
    them (all int32)

    Queued on the current stream.
    """
    arrays = [plan.sent, plan.received, plan.returned, plan.positions, plan.members, plan.starts]
    header = [*plan.sends, *plan.takes, *map(len, arrays)]
    device, number = arrays[0].device, sum(map(len, arrays))
    here = device.staging(4 * len(header)).view(np.int32)
    here[:] = header
    block = arrays[0].empty((number + len(header),), np.int32)
    if number:
        device.kernels.pack([array for array in arrays if len(array)], block[:number].view(np.uint8))
    device.copy(block[number:], here)
    return block.view(np.uint8)


def unpack_device_plan(block: DeviceArray, ranks: int, on_wait: Callable[[], None]) -> DeviceDispatchPlan:
    """Undo `pack_device_plan`, over the same memory.

    The host waits for the counts and lengths; on_wait: see `wait_for`.
    """
    numbers = block.view(np.int32)
    count = 2 * ranks + _ARRAYS
    header = copy_to_host(numbers[len(numbers) - count :], on_wait).tolist()
    ends = pairwise(accumulate(header[2 * ranks :], initial=0))
    sent, received, returned, positions, members, starts = (numbers[start:stop] for start, stop in ends)
    return DeviceDispatchPlan(
        sent, received, returned, positions, members, starts, header[:ranks], header[ranks : 2 * ranks]
    )


def stream_alloc(x: DeviceArray, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Allocate memory on the stream that owns `x`; the current stream may write it.

    A device reuses memory in the order of the stream that allocated it. Memory of another stream could be reused while
    the caller's stream still reads it.
    """
    device, here = x.device, x.device.current()
    if x.stream is None or x.stream == here:
        return x.empty(shape, dtype)
    with device.using(x.stream):
        array = x.empty(shape, dtype)
    here.wait(x.stream.record())  # the previous user of this memory may still be using it
    return array
