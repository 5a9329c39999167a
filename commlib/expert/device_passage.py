"""DevicePassage: how the tokens of one call go to experts and come back, as numbers in the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from commlib.communicator import Communicator
from commlib.devices.array import DeviceArray
from commlib.dtypes import Array
from commlib.expert.made import made_for
from commlib.expert.passage import Assigned
from commlib.expert.placement import Placement
from commlib.kernels.host.travel import count_travellers, order_numbers, take_travellers, write_places


@dataclass(frozen=True, slots=True)
class DevicePassage:
    """What `commlib.kernels.host.travel.write_places` has written, all int32.

    starts: where those of each token begin in `members`, and how many there are in all. sends, takes: rows that go to
    each rank, and come from it, but the own.
    """

    sent: DeviceArray
    came: DeviceArray
    returned: DeviceArray
    found: DeviceArray
    members: DeviceArray
    starts: DeviceArray
    sends: list[int]
    takes: list[int]


class Passages:
    """Makes passages. comm: see `commlib.expert.on_device.OnDevice`."""

    def __init__(self, comm: Communicator, placement: Placement) -> None:
        self._comm = comm
        self._owners, self._order = (np.array(each, np.int32) for each in (placement.owners, placement.order))
        self._own = np.array(placement.of_rank(comm.rank), np.int64)

    def make(
        self, x: DeviceArray, counts: Array, assigned: Assigned, gates: Array
    ) -> tuple[DevicePassage, DeviceArray, Array]:
        """Return a passage, the gates of the rows that come, and how many come for each expert here (int32).

        counts: of all ranks' assignments, int64 [ranks, experts]. gates: float32, on the host; they travel there, and
        go to the device of `x` with the passage, in one copy that is queued. Collective.
        """
        comm, order, owners, rank = self._comm, self._order, self._owners, self._comm.rank
        local, number = counts[:, self._own].sum(0), len(assigned.tokens)
        sends, takes = np.empty(comm.size, np.int64), np.empty(comm.size, np.int64)
        count_travellers(counts, owners, rank, sends, takes)
        going, coming, here = int(sends.sum()), int(takes.sum()), int(local.sum())
        ends = list(accumulate((going, here, coming, number, number, len(assigned.starts), here), initial=0))
        block = x.device.staging(4 * ends[-1]).view(np.int32)
        sent, came, returned, found, members, starts, row_gates = _cut(block, ends)
        tokens, slots = assigned.tokens, assigned.slots
        write_places(counts, order, owners, rank, tokens, slots, sent, came, returned, found, members)
        starts[:] = assigned.starts
        heard = told = np.empty(going, np.float32)
        take_travellers(counts, order, owners, rank, gates, told)
        if comm.size > 1:
            heard, _ = comm.all_to_all_v(told, sends.tolist(), takes=takes.tolist())
        order_numbers(found, returned, gates, heard, row_gates.view(np.float32))
        there = made_for(x, (ends[-1],), np.int32)
        x.device.copy(there, block)
        sent, came, returned, found, members, starts, row_gates = _cut(there, ends)
        passage = DevicePassage(sent, came, returned, found, members, starts, sends.tolist(), takes.tolist())
        return passage, row_gates.view(np.float32), local.astype(np.int32)


def _cut(x: Any, ends: list[int]) -> list[Any]:
    return [x[start:stop] for start, stop in pairwise(ends)]
