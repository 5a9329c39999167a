"""Slots: lend bucket slots to a framework as gradients, and reclaim those that are no longer referenced.

A gradient that was reduced in its slot needs no copy: the framework gets an array over the slot. A framework that keeps
this gradient expects it to stay the same. Before slots are written again, reference counts therefore show which arrays
are still in use. A bucket with arrays in use leaves its memory to them until the last reference is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.dtypes import Array

(_IDLE,) = map(getrefcount, [np.empty(0)])  # Python versions differ


class Slots:
    """The slots of `count` gradients, numbered from 0. `view(number, slot)` reshapes a slot to its gradient's shape."""

    def __init__(self, count: int, view: Callable[[int, Any], Any]) -> None:
        self._view = view
        self.views: list[Array] = [np.empty(0) for _ in range(count)]
        """Slots as arrays to lend. Only gradients that were made from them hold references to these objects."""
        self._left: dict[int, list[Array]] = {}
        """Lent arrays in the symmetric memory of buckets that moved to private memory."""
        self.copied: set[int] = set()
        """Gradients that the framework was found to keep: their results are copied from then on."""

    def use(self, engine: BucketReducer, members: Sequence[Sequence[int]]) -> None:
        """Use the slots of `engine`, whose buckets have these `members`. Arrays lent earlier stay valid."""
        self._engine, self._members = engine, members
        self._left.clear()
        self.views = [np.empty(0) for _ in self.views]
        for bucket in range(len(members)):
            self._find(bucket)

    def free(self, moved: Callable[[int], None], adds_up: Callable[[int], bool] = lambda number: False) -> None:
        """Ensure that slots that will be written are no longer referenced. Nothing may be in flight, or put.

        `moved` is called for each gradient whose slot has moved. `adds_up` returns whether the holder of a gradient
        expects it to change, because autograd adds to it in place.
        """
        for bucket, arrays in list(self._left.items()):
            if not any(_find_in_use(arrays)):
                del self._left[bucket]
                self._move(bucket, moved, aside=False)
        in_use = _find_in_use(self.views)
        if not any(in_use):
            return
        for bucket, members in enumerate(self._members):
            surprised = [number for number in members if in_use[number] and not adds_up(number)]
            if surprised:
                self.copied.update(surprised)
                if not self._engine.is_private(bucket):
                    self._left[bucket] = [self.views[number] for number in members]
                self._move(bucket, moved, aside=True)

    def _move(self, bucket: int, moved: Callable[[int], None], *, aside: bool) -> None:
        self._engine.move(bucket, aside=aside)
        self._find(bucket)
        for number in self._members[bucket]:
            moved(number)

    def _find(self, bucket: int) -> None:
        for number in self._members[bucket]:
            view = self._view(number, self._engine.slot(number))
            if view is not None:
                self.views[number] = view


def _find_in_use(arrays: list[Array]) -> list[bool]:
    """Return for each array whether a gradient made from it, or another object on its memory, still exists."""
    return [count > _IDLE for count in map(getrefcount, arrays)]
