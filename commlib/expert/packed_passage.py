"""Packed passages: a device's passage as one array, for a framework whose graphs carry nothing else.

sent | came | returned | found | members | starts | sends, takes, and how long the arrays before are   (all int32)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.copies import fetched
from commlib.expert.device_passage import DevicePassage

_ARRAYS = 6


def packed(passage: DevicePassage) -> DeviceArray:
    """Return a passage as bytes (uint8) of its device. Queued on the current stream."""
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


def unpacked(block: DeviceArray, ranks: int, on_wait: Callable[[], None]) -> DevicePassage:
    """Undo `packed`, over the same memory. The host waits for what it must know; on_wait: see `wait_for`."""
    numbers = block.view(np.int32)
    count = 2 * ranks + _ARRAYS
    told = fetched(numbers[len(numbers) - count :], on_wait).tolist()
    ends = pairwise(accumulate(told[2 * ranks :], initial=0))
    sent, came, returned, found, members, starts = (numbers[start:stop] for start, stop in ends)
    return DevicePassage(sent, came, returned, found, members, starts, told[:ranks], told[ranks : 2 * ranks])
