"""Drain and peek for queues that several threads empty. A check for emptiness before the pop would be a race."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def drain(queue: deque[T]) -> Iterator[T]:
    """Pop items from the left until the queue is empty. Each item goes to one thread only."""
    while True:
        try:
            item = queue.popleft()
        except IndexError:
            return
        yield item


def peek(queue: deque[T]) -> T | None:
    """Return the first item of a queue without removing it; None if the queue is empty."""
    try:
        return queue[0]
    except IndexError:
        return None
