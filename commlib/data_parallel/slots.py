"""Slots: lend places in buckets to a framework as gradients, and take back those that are no longer referred to.

A gradient that was reduced in its slot needs no copy: the framework gets an array over the slot itself. A framework
that keeps this gradient expects it to stay the same. So before slots are written again, reference counts show which
arrays are still in use. Buckets of those leave their memory to the users of the arrays, until the last reference is
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from commlib.data_parallel.engine import Engine
from commlib.dtypes import Array

(_IDLE,) = map(getrefcount, [np.empty(0)])  # versions of Python differ


class Slots:
    """The slots of `count` gradients, numbered from 0. `view(number, slot)` gives a slot the shape of its gradient."""

    def __init__(self, count: int, view: Callable[[int, Any], Any]) -> None:
        self._view = view
        self.lent: list[Array] = [np.empty(0) for _ in range(count)]
        """Slots as arrays, to be lent. Nothing refers to these very objects but gradients that were made of them."""
        self._left: dict[int, list[Array]] = {}
        """Those in the symmetric memory of buckets that moved aside."""
        self.copied: set[int] = set()
        """Gradients that were found kept: theirs have memory of their own from then on."""

    def use(self, engine: Engine, members: Sequence[Sequence[int]]) -> None:
        """Take the slots of `engine`, whose buckets have these `members`. What was lent before stays valid."""
        self._engine, self._members = engine, members
        self._left.clear()
        self.lent = [np.empty(0) for _ in self.lent]
        for bucket in range(len(members)):
            self._find(bucket)

    def free(self, moved: Callable[[int], None], adds_up: Callable[[int], bool] = lambda number: False) -> None:
        """Make sure that slots to be written are no longer referred to. Nothing may be in flight, or put.

        `moved` is called for each gradient whose slot is elsewhere afterwards. `adds_up` tells that the holder of a
        gradient expects it to change: autograd adds to it where it is.
        """
        for bucket, arrays in list(self._left.items()):
            if not any(_are_kept(arrays)):
                del self._left[bucket]
                self._move(bucket, moved, aside=False)
        kept = _are_kept(self.lent)
        if not any(kept):
            return
        for bucket, members in enumerate(self._members):
            surprised = [number for number in members if kept[number] and not adds_up(number)]
            if surprised:
                self.copied.update(surprised)
                if not self._engine.is_aside(bucket):
                    self._left[bucket] = [self.lent[number] for number in members]
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
                self.lent[number] = view


def _are_kept(arrays: list[Array]) -> list[bool]:
    """Tell of each array whether a gradient that was made of it, or whatever shares its memory, still exists."""
    return [count > _IDLE for count in map(getrefcount, arrays)]
