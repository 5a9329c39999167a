"""Verbs on picklable objects. Unpickling runs code: ranks trust each other."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.collectives import movement
from commlib.group.operation import Operation

if TYPE_CHECKING:
    from commlib.group.group import Group


def broadcast_object(group: Group, value: Any, root: int) -> Operation:
    group.check_root("broadcast_object", root)
    text = f"broadcast_object, root={root}"
    data = pickle.dumps(value) if group.rank == root else b""  # what cannot be pickled must fail before ranks meet
    return Operation(text, lambda: group.exchange_bytes(data, root, text), finish=pickle.loads)


def all_gather_object(group: Group, value: Any) -> Operation:
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    gathering = movement.all_gather_v(group, data)
    lengths = movement.all_gather(group, np.array([len(data)], np.int64), None, "auto")

    def run() -> list[Any]:
        stops = np.cumsum(lengths.run())
        return np.split(gathering.run(), stops[:-1])

    def load(parts: list[Any]) -> list[Any]:
        return [pickle.loads(part.tobytes()) for part in parts]

    return Operation("all_gather_object", run, finish=load)
