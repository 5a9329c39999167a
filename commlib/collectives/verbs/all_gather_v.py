"""all_gather_v: every rank gets the arrays of all ranks, one after another, whose lengths may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.device.staged import made_on_device
from commlib.collectives.device.staging_queue import OnWait
from commlib.collectives.device.uneven import between_devices, gather_rows
from commlib.collectives.host.by_messages import MessageCall
from commlib.collectives.host.gathering import gather_counts, gather_parts
from commlib.collectives.operands import made_like, rows, source
from commlib.collectives.ready import Calls, Ready, itself
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import name_of_device


def all_gather_v(calls: Calls, x: Any) -> Ready:
    group = calls.group
    array = source(x, "all_gather_v")
    _, row = rows(array, "all_gather_v")
    # The length of dimension 0 may differ.
    text = Call("all_gather_v", array[:0].shape, array.dtype, algorithm="", device=name_of_device(array)).text

    def move(x: Any, _: Any) -> Any:
        lengths = gather_counts(group, text, np.array([len(x)], np.int64))
        gathered, given = made_like(x, (int(lengths.sum()), *x.shape[1:]))
        gather_parts(group, text, x, gathered, [int(n) * row for n in lengths])
        return given

    call = MessageCall(group, text, move, flat=False)
    if type(array) is not DeviceArray:
        return Ready(call, array, array, itself, x=x)
    station, peers = calls.station(array.device), calls.peers(array.device)
    there = made_on_device(group, station, call)
    if peers.may_exchange:

        def gather(x: DeviceArray, on_wait: OnWait) -> Any:
            return group.perform_call(text, gather_rows, *peers.opened(), group, text, x, on_wait)

        there = between_devices(peers, station, text, gather, there)
    return Ready(there, array, array, itself, x=x)
