"""Held queues: what this thread puts there and takes is undone, and what others do is left."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, LifoQueue
from typing import Any

from commlib.snapshot.held import Held, same
from commlib.snapshot.reached import runs_elsewhere


def held_queue(value: Any) -> Held:
    """Hold a queue: what this thread puts there and takes is undone, and what others do is left."""
    here, own, before = threading.get_ident(), vars(value), dict(vars(value))
    put, get = value._put, value._get
    came: list[Any] = []
    went: list[Any] = []

    def noted_put(item: Any) -> None:
        put(item)
        if threading.get_ident() == here:
            came.append(item)

    def noted_get() -> Any:
        item = get()
        if threading.get_ident() == here and not _removed(came, item):
            went.append(item)
        return item

    def restore() -> None:
        with value.mutex:
            for name in ("_put", "_get"):
                own.pop(name) if name not in before else own.__setitem__(name, before[name])
            value.unfinished_tasks -= sum(_removed(value.queue, item) for item in came)
            waiting = [get() for _ in range(value._qsize())] if went else []
            every = [*went, *waiting]
            for item in reversed(every) if isinstance(value, LifoQueue) else every:
                put(item)
            value.not_empty.notify(len(went))

    own.update(_put=noted_put, _get=noted_get)
    return Held(restore, list(value.queue))


def _removed(items: Any, item: Any) -> bool:
    """Remove an object from a list or deque; return whether it was there."""
    for at, one in enumerate(items):
        if one is item:
            del items[at]
            return True
    return False


def held_simple_queue(value: Any) -> Held:
    """Hold a queue that cannot be looked into, unless another thread may take from it meanwhile."""
    if runs_elsewhere():
        return Held()
    before = _emptied(value)
    for one in before:
        value.put(one)

    def restore() -> None:
        if not same(now := _emptied(value), before) and not runs_elsewhere():
            now = before
        for one in now:
            value.put(one)

    return Held(restore, before)


def _emptied(value: Any) -> list[Any]:
    found = []
    with suppress(Empty):
        while True:
            found.append(value.get_nowait())
    return found
