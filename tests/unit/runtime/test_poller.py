"""The poller tests works until they are done, and drops them with their owner."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from commlib.runtime.poller import MessagePoller


@pytest.fixture
def poller():
    created = MessagePoller()
    yield created
    created.close()


class Counted:
    description = "counted"

    def __init__(self, needed):
        self.needed, self.asked = needed, 0

    def done(self):
        self.asked += 1
        return self.asked >= self.needed


def test_a_work_is_tested_until_it_is_done(poller):
    works = [Counted(5), Counted(50)]
    for work in works:
        poller.watch(work, "owner")
    assert poller.drain(10) == ""
    tests = [work.asked for work in works]
    assert tests == [5, 50]
    time.sleep(0.05)
    assert [work.asked for work in works] == tests


def test_drain_names_unfinished_works(poller):
    assert poller.drain(0) == ""
    poller.watch(Counted(10**9), "owner")
    assert poller.drain(0.05) == "unfinished counted"


def test_a_new_work_is_tested_at_once_though_another_lasts(poller):
    poller.watch(Counted(10**9), "patient")
    time.sleep(0.1)  # the naps are long now
    start = time.monotonic()
    for _ in range(100):
        work = Counted(3)
        poller.watch(work, "owner")
        while work.asked < 3 and time.monotonic() - start < 10:
            time.sleep(1e-4)
    assert time.monotonic() - start < 3


def test_works_of_a_dropped_owner_are_not_tested(poller):
    forgotten, other = Counted(10**9), Counted(10**9)
    poller.watch(forgotten, owner := object())
    poller.watch(other, object())
    poller.forget(owner)
    tests, others = forgotten.asked, other.asked
    time.sleep(0.1)
    assert forgotten.asked == tests
    assert other.asked > others


def test_an_idle_attendant_keeps_nothing_alive(poller):
    work = Counted(2)
    reference = weakref.ref(work)
    poller.watch(work, "owner")
    assert poller.drain(10) == ""
    del work
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert reference() is None


def test_the_thread_ends_after_close_and_no_thread_without_works(poller):
    assert poller.thread is None
    poller.join(0)
    poller.watch(Counted(1), "owner")
    thread = poller.thread
    assert isinstance(thread, threading.Thread)
    assert thread.daemon
    poller.close()
    poller.join(5)
    assert not thread.is_alive()
