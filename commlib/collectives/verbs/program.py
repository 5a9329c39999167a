"""program: what uses other groups, as one operation in the order of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.collectives.device.call import DeviceCall
from commlib.collectives.host.by_messages import MessageCall
from commlib.collectives.ready import Calls, Ready, itself
from commlib.collectives.verbs.barrier import NOTHING
from commlib.devices.array import DeviceArray


def program(calls: Calls, text: str, run: Callable[[], Any], on: Any = None) -> Ready:
    whole = MessageCall(calls.group, text, lambda *_: run())
    if type(on) is not DeviceArray:
        return Ready(whole, NOTHING, NOTHING, itself)
    station = calls.station(on.device)
    call = DeviceCall(calls.group.progress, text, station, lambda *_: whole.perform(NOTHING, NOTHING))
    return Ready(call, on, on, itself)
