"""program: run a function that calls other groups as one operation in the order of this group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.collectives.call_table import Calls, PreparedCall, return_value
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.verbs.barrier import NOTHING
from commlib.devices.array import DeviceArray


def program(calls: Calls, text: str, run: Callable[[], Any], on: Any = None) -> PreparedCall:
    whole = MessageCall(calls.group, text, lambda *_: run(), flat=False)
    if type(on) is not DeviceArray:
        return PreparedCall(whole, NOTHING, NOTHING, return_value)
    return PreparedCall(DeviceCall(calls.context(on.device), text, whole), on, on, return_value)
