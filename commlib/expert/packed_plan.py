"""Packed plans: a device's dispatch plan as one array, for frameworks whose graphs carry only tensors.

sent | came | returned | found | members | starts | sends, takes, and the lengths of the arrays before them   (all
int32)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_host
from commlib.expert.device_plan import DeviceDispatchPlan

_ARRAYS = 6


def pack_device_plan(passage: DeviceDispatchPlan) -> DeviceArray:
    """Return a plan as bytes (uint8) on its device. Queued on the current stream."""
    arrays = [passage.sent, passage.came, passage.returned, passage.found, passage.members, passage.starts]
    told = [*passage.sends, *passage.takes, *map(len, arrays)]
    device, number = arrays[0].device, sum(map(len, arrays))
    here = device.staging(4 * len(told)).view(np.int32)
    here[:] = told
    block = arrays[0].empty((number + len(told),), np.int32)
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
    told = copy_to_host(numbers[len(numbers) - count :], on_wait).tolist()
    ends = pairwise(accumulate(told[2 * ranks :], initial=0))
    sent, came, returned, found, members, starts = (numbers[start:stop] for start, stop in ends)
    return DeviceDispatchPlan(sent, came, returned, found, members, starts, told[:ranks], told[ranks : 2 * ranks])
