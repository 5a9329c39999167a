"""all_gather_v: every rank gets the arrays of all ranks, concatenated; the lengths of dimension 0 may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall, return_value
from commlib.collectives.device.host_staging import make_device_call
from commlib.collectives.device.staging_queue import OnWait
from commlib.collectives.device.uneven_exchange import gather_rows, run_between_devices
from commlib.collectives.host.gathering import gather_counts, gather_parts
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.operands import allocate_like, rows, source
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import name_of_device


def all_gather_v(calls: Calls, x: Any) -> PreparedCall:
    group = calls.group
    array = source(x, "all_gather_v")
    _, row = rows(array, "all_gather_v")
    # Dimension 0 is left out: its length may differ.
    device = name_of_device(array)
    text = Call("all_gather_v", array[:0].shape, array.dtype, algorithm="", device=device, label=calls.label).text

    def move(x: Any, _: Any) -> Any:
        lengths = gather_counts(group, text, np.array([len(x)], np.int64))
        gathered, given = allocate_like(x, (int(lengths.sum()), *x.shape[1:]))
        gather_parts(group, text, x, gathered, [int(n) * row for n in lengths])
        return given

    call = MessageCall(group, text, move, flat=False)
    if type(array) is not DeviceArray:
        return PreparedCall(call, array, array, return_value, x=x)
    station, peers = calls.station(array.device), calls.peers(array.device)
    device_call = make_device_call(group, station, call)
    if peers.may_exchange:

        def gather(x: DeviceArray, on_wait: OnWait) -> Any:
            return group.calls.perform(text, gather_rows, *peers.opened(), group, text, x, on_wait)

        device_call = run_between_devices(peers, station, text, gather, device_call)
    return PreparedCall(device_call, array, array, return_value, x=x)
