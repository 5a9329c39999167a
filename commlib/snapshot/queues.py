"""Queues in a snapshot: undo the puts and gets of this thread, but not of other threads."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, LifoQueue
from typing import Any

from commlib.snapshot.object_snapshot import ObjectSnapshot, are_same_objects
from commlib.snapshot.reachable_code import runs_elsewhere


def snapshot_queue(value: Any) -> ObjectSnapshot:
    """Snapshot a queue: restore undoes the puts and gets of this thread, but not of other threads."""
    here, own, before = threading.get_ident(), vars(value), dict(vars(value))
    put, get = value._put, value._get
    arrived: list[Any] = []
    went: list[Any] = []

    def noted_put(item: Any) -> None:
        put(item)
        if threading.get_ident() == here:
            arrived.append(item)

    def noted_get() -> Any:
        item = get()
        if threading.get_ident() == here and not _remove(arrived, item):
            went.append(item)
        return item

    def restore() -> None:
        with value.mutex:
            for name in ("_put", "_get"):
                own.pop(name) if name not in before else own.__setitem__(name, before[name])
            value.unfinished_tasks -= sum(_remove(value.queue, item) for item in arrived)
            waiting = [get() for _ in range(value._qsize())] if went else []
            every = [*went, *waiting]
            for item in reversed(every) if isinstance(value, LifoQueue) else every:
                put(item)
            value.not_empty.notify(len(went))

    own.update(_put=noted_put, _get=noted_get)
    return ObjectSnapshot(restore, list(value.queue))


def _remove(items: Any, item: Any) -> bool:
    """Remove an object from a list or deque; return whether it was found."""
    for at, one in enumerate(items):
        if one is item:
            del items[at]
            return True
    return False


def snapshot_simple_queue(value: Any) -> ObjectSnapshot:
    """Snapshot a queue without access to its items, unless another thread may take items meanwhile."""
    if runs_elsewhere():
        return ObjectSnapshot()
    before = _empty(value)
    for one in before:
        value.put(one)

    def restore() -> None:
        if not are_same_objects(now := _empty(value), before) and not runs_elsewhere():
            now = before
        for one in now:
            value.put(one)

    return ObjectSnapshot(restore, before)


def _empty(value: Any) -> list[Any]:
    items = []
    with suppress(Empty):
        while True:
            items.append(value.get_nowait())
    return items
