"""taken, first: read a queue that other threads may empty too. To ask first whether there is something is too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def taken(queue: deque[T]) -> Iterator[T]:
    """Take what is in a queue, first things first, until there is nothing. Each thing comes to one thread only."""
    while True:
        try:
            thing = queue.popleft()
        except IndexError:
            return
        yield thing


def first(queue: deque[T]) -> T | None:
    """Return what is first in a queue, and stays there; None if there is nothing."""
    try:
        return queue[0]
    except IndexError:
        return None
