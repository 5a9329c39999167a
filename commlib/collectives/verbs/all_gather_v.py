"""all_gather_v: every rank gets the arrays of all ranks, concatenated; the lengths of dimension 0 may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall, return_value
from commlib.collectives.device.call import DeviceCall, InnerCall
from commlib.collectives.device.host_staging import StagedResult
from commlib.collectives.device.uneven_exchange import NodeExchange, RowGather
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
    context = calls.context(array.device)
    inner: InnerCall = call if group.transport.accepts(device) else StagedResult(context.queue, call)
    if context.peers.may_exchange:
        inner = NodeExchange(context.peers, text, RowGather(context.peers, text), inner)
    return PreparedCall(DeviceCall(context, text, inner), array, array, return_value, x=x)
