"""Queues that two threads empty."""

from __future__ import annotations

import threading
from collections import deque

from commlib.p2p.channels.drain import drain, peek


def test_items_come_in_order():
    queue = deque([1, 2, 3])
    assert peek(queue) == 1 and next(drain(queue)) == 1 and list(drain(queue)) == [2, 3]
    assert peek(queue) is None and next(drain(queue), None) is None


def test_items_added_meanwhile_are_taken():
    queue = deque([3])
    seen = []
    for number in drain(queue):
        seen.append(number)
        queue.extend([number - 1] * (number > 0))
    assert seen == [3, 2, 1, 0]


def test_each_item_goes_to_one_thread():
    everything = deque(range(200_000))
    taken_by: list[list[int]] = [[], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(drain(everything))) for mine in taken_by]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted([*taken_by[0], *taken_by[1]]) == list(range(200_000))
