"""Small asynchronous calls, which begin in the caller's thread; and groups, which do not wait for each other."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import MismatchError, ShutdownError, StallError
from commlib.runtime.started_operations import StartedOperations
from commlib.transport.base import Space
from tests.bodies.loopback import run


def warm(comm):
    """The first call of a kind takes the general way."""
    comm.all_reduce(np.zeros(3))


def test_peers_can_finish_without_a_wait_of_a_rank_that_has_begun():
    turn = threading.Event()

    def check(comm):
        warm(comm)
        x = np.full(3, comm.rank + 1.0)
        if comm.rank == 0:
            work = comm.all_reduce_async(x, out=x)
            turn.wait(10)  # the others have completed, though this rank has not waited yet
            assert isinstance(work, StartedOperations)
            assert work.wait() is x
        else:
            time.sleep(0.05)
            assert comm.all_reduce_async(x, out=x).wait() is x
            if comm.rank == 2:
                turn.set()
        assert (x == 6).all()

    run(3, check)


def test_later_calls_run_in_order():
    def check(comm):
        warm(comm)
        x, y = np.full(3, 1.0 + comm.rank), np.full(3, 10.0)
        if comm.rank == 1:
            time.sleep(0.1)  # rank 0 has to leave its first call unfinished
        first = comm.all_reduce_async(x, out=x)
        second = comm.all_reduce_async(y, out=y)
        third = comm.all_reduce(np.full(3, 100.0))
        assert (third == 200).all()
        assert first.done() and second.done()
        assert (x == 3).all() and (y == 20).all()

    run(2, check)


def test_a_begun_call_need_not_be_waited_for():
    def check(comm):
        warm(comm)
        for _ in range(3):
            x = np.ones(3)
            if comm.rank == 0:
                time.sleep(0.02)
            comm.all_reduce_async(x, out=x)
            del x
        comm.barrier()
        assert comm.group.progress.drain(5) == ""

    run(2, check)


def test_done_and_a_timeout_do_not_block():
    def check(comm):
        warm(comm)
        x = np.ones(3)
        if comm.rank == 0:
            work = comm.all_reduce_async(x, out=x)
            assert not work.done()
            with pytest.raises(StallError, match="not done after"):
                work.wait(0.05)
            comm.group.transport.space(Space.MESSAGES).send(1, 5, memoryview(b"go"))
            while not work.done():
                time.sleep(0.001)
            assert (work.result() == 2).all() and work.exception() is None
        else:
            messages = comm.group.transport.space(Space.MESSAGES)
            messages.wait([messages.recv(0, 5, memoryview(bytearray(2)))], lambda: None)
            comm.all_reduce(x, out=x)

    run(2, check)


def test_a_mismatch_is_raised_where_the_work_is_waited_for():
    def check(comm):
        warm(comm)
        comm.all_reduce(np.zeros(4))
        work = comm.all_reduce_async(np.zeros(3 + comm.rank))
        with pytest.raises(MismatchError, match="3 x float64"):
            work.wait()
        assert isinstance(work.exception(), MismatchError)
        assert (comm.all_reduce(np.ones(3)) == 2).all()

    run(2, check)


def test_a_plan_is_begun_too():
    def check(comm):
        x = np.zeros(3)
        plan = comm.plan_all_reduce(x, out=x)
        for step in range(20):
            x[:] = step + comm.rank
            work = plan.start()
            assert work.wait() is x
            assert (x == 2 * step + 1).all()

    run(2, check)


def test_calls_begun_at_shutdown_are_dropped_with_an_error():
    def check(comm):
        warm(comm)
        if comm.rank == 0:
            work = comm.all_reduce_async(np.zeros(3))
            comm.group.progress.close()
            with pytest.raises(ShutdownError):
                work.wait()

    run(2, check)


def test_threads_with_their_own_groups_run_independently():
    """With one queue for all groups, two ranks that began with different groups waited for each other for ever."""

    def check(comm):
        groups = [comm.split(0, comm.rank) for _ in range(3)]
        failures = []

        def use(number):
            chance = random.Random(100 * comm.rank + number)
            group = groups[number]
            try:
                for step in range(30):
                    time.sleep(chance.random() * 2e-3)
                    x = np.full(3 if step % 2 else 3000, float(step + group.rank))
                    total = group.all_reduce(x) if step % 3 else group.all_reduce_async(x).wait()
                    assert (total == 3 * step + 3).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    run(3, check, config=Config(timeout=20))
    run(3, check, nodes=[0, 0, 1], config=Config(timeout=20))


def test_a_dropped_group_ends_its_thread():
    def check(comm):
        group = comm.split(0)
        group.all_reduce_async(np.ones(3000)).wait()
        thread = group.group.progress.thread
        assert thread is not None and thread.is_alive()
        del group
        for _ in range(100):  # the thread may still hold it for a moment
            gc.collect()
            thread.join(0.05)
            if not thread.is_alive():
                break
        assert not thread.is_alive()

    run(2, check)
