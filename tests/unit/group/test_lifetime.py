"""A dropped group is freed at once, without the garbage collector, and its progress thread ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from commlib.communicator import Communicator
from commlib.config.settings import Config
from tests.bodies.loopback import run

NODES = [[0, 0], [0, 1], [0, 0, 1, 1]]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def collectives(group: Communicator) -> None:
    x = np.ones(3)
    for _ in range(3):
        assert (group.all_reduce(x) == group.size).all()
        group.all_reduce_async(np.ones(3000)).wait()
        group.all_gather(x)
        group.barrier()
    assert group.all_gather_object(group.rank) == list(range(group.size))


def plans(group: Communicator) -> None:
    group.plan_all_reduce(np.ones(3))()
    group.plan_all_reduce(np.ones(3000)).start().wait()


def memory(group: Communicator) -> None:
    x = group.empty(3000)
    group.all_reduce(x, out=x)


def mismatch(group: Communicator) -> None:
    with pytest.raises(Exception, match="the ranks do not make the same call"):
        group.all_reduce(np.ones(3 + group.rank))


def messages(group: Communicator) -> None:
    peer = group.rank ^ 1
    for count in (3, 100_000):
        group.send_recv(np.ones(count), peer, np.ones(count), peer)
    send = group.send_async(np.ones(3), peer)
    group.recv(np.ones(3), peer)
    send.wait()


def channels(group: Communicator) -> None:
    channel = group.channel(group.rank ^ 1, "edge", 3)
    channel.send(np.ones(3, np.float32))
    channel.release(channel.recv())
    group.barrier()
    channel.close()


def parts(group: Communicator) -> None:
    group.node().barrier()
    group.labelled("a label").all_reduce(np.ones(3))
    group.split(group.rank % 2).barrier()


def settle(is_done: Callable[[], bool]) -> bool:
    """Wait for threads that may hold a group for a moment."""
    from time import sleep

    for _ in range(300):
        if is_done():
            return True
        sleep(0.01)
    return False


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("use", [collectives, plans, memory, mismatch, messages, channels, parts])
def test_a_dropped_group_is_freed_by_its_last_reference(use, nodes):
    """It was part of reference cycles, and lived with its memory and its thread until the next garbage collection."""

    def check(comm: Communicator) -> None:
        group = comm.split(0)
        group.all_reduce_async(np.ones(3000)).wait()
        use(group)
        thread, freed = group.group.progress.thread, weakref.ref(group.group)
        key = f"{comm.runtime.token}.{group.group.key}", group.size
        comm.barrier()
        del group
        assert settle(lambda: freed() is None), gc.get_referrers(freed())
        assert thread is not None
        thread.join(5)
        assert not thread.is_alive()
        noted: list[Any] = []

        def gather(notes: list[Any]) -> list[Any]:
            noted.extend(notes)
            return []  # so that nothing is freed

        comm.barrier()
        comm.runtime.retired.free(gather)
        assert key in noted
        comm.barrier()

    run(len(nodes), check, nodes=nodes, config=Config(timeout=20))


@pytest.mark.parametrize("nodes", NODES)
def test_works_and_plans_keep_their_group(nodes):
    """A plan, and a work that has not run, still use the group that the user has dropped."""

    def check(comm: Communicator) -> None:
        x, y, total = np.ones(3), np.ones(3000), float(comm.size)
        plans = [comm.split(0).plan_all_reduce(x), comm.split(0).plan_all_reduce(y)]
        for _ in range(3):
            assert all((plan() == total).all() for plan in plans)
            assert all((plan.start().wait() == total).all() for plan in plans)
        for array in (x, y):
            works = [comm.split(0).all_reduce_async(array) for _ in range(3)]
            assert all((work.wait() == total).all() for work in works)
        group = comm.split(0)
        works = [group.all_reduce_async(y) for _ in range(5)]
        works += [group.all_gather_object_async(comm.rank)]
        del group
        assert works.pop().wait() == list(range(comm.size))
        assert all((work.wait() == total).all() for work in works)

    run(len(nodes), check, nodes=nodes, config=Config(timeout=20))


@pytest.mark.parametrize("nodes", NODES)
def test_channels_and_messages_keep_their_group(nodes):
    def check(comm: Communicator) -> None:
        peer = comm.rank ^ 1
        channel = comm.split(0).channel(peer, "edge", 3)
        channel.send(np.full(3, comm.rank, np.float32))
        assert (channel.recv() == peer).all()
        group = comm.split(0)
        receive, send = group.recv_async(np.ones(100_000), peer), group.send_async(np.ones(100_000), peer)
        del group
        assert (receive.wait() == 1).all() and send.wait() is None
        comm.barrier()
        channel.close()

    run(len(nodes), check, nodes=nodes, config=Config(timeout=20))
