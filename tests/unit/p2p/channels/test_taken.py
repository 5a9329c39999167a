"""Queues that two threads empty."""

from __future__ import annotations

import threading
from collections import deque

from commlib.p2p.channels.drain import drain, peek


def test_first_things_first():
    queue = deque([1, 2, 3])
    assert peek(queue) == 1 and next(drain(queue)) == 1 and list(drain(queue)) == [2, 3]
    assert peek(queue) is None and next(drain(queue), None) is None


def test_what_comes_meanwhile_is_taken_too():
    queue = deque([3])
    seen = []
    for number in drain(queue):
        seen.append(number)
        queue.extend([number - 1] * (number > 0))
    assert seen == [3, 2, 1, 0]


def test_each_thing_comes_to_one_thread():
    everything = deque(range(200_000))
    kept: list[list[int]] = [[], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(drain(everything))) for mine in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([*kept[0], *kept[1]]) == list(range(200_000))
