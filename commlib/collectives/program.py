"""program: what uses other groups, as one operation in the order of this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.collectives.barrier import NOTHING
from commlib.collectives.by_messages import MessageCall
from commlib.collectives.ready import Calls, Ready, itself


def program(calls: Calls, text: str, run: Callable[[], Any]) -> Ready:
    return Ready(MessageCall(calls.group, text, lambda *_: run()), NOTHING, NOTHING, itself)
