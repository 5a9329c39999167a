"""Work: order, overlap of async and blocking calls, timeouts, many in flight, several threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import commlib
from commlib.errors import StallError, UsageError
from commlib.observe import Phase

pytestmark = pytest.mark.any_ranks


def test_works_run_in_launch_order_on_a_single_progress_thread(comm):
    """Small operations may end in the caller's thread: these are too large for that."""
    commlib.start_recording()
    try:
        works = [comm.all_reduce_async(np.full(100_000, step)) for step in range(50)]
        works[-1].wait()
        assert all(work.done() for work in works)  # so every earlier one had ended
        assert [int(work.wait()[-1]) for work in works] == [step * comm.size for step in range(50)]
        ran = [event for event in commlib.recorded() if event.phase is Phase.RUN and event.group == comm.name]
    finally:
        commlib.stop_recording()
    assert [event.sequence for event in ran] == list(range(ran[0].sequence, ran[0].sequence + 50))
    assert len({event.thread for event in ran}) == 1 and threading.get_ident() != ran[0].thread


def test_small_works_end_in_launch_order(comm):
    works = [comm.all_reduce_async(np.array([step])) for step in range(50)]
    works[-1].wait()
    assert all(work.done() for work in works)
    assert [int(work.wait()[0]) for work in works] == [step * comm.size for step in range(50)]


def test_each_work_sees_the_previous_results(comm):
    x = np.ones(5000)
    works = [comm.all_reduce_async(x, out=x) for _ in range(8)]
    works.append(comm.all_reduce_async(x, out=x, algorithm="ring"))
    assert works[-1].wait() is x
    assert (x == float(comm.size) ** 9).all()


def test_a_blocking_call_waits_for_earlier_works(comm):
    for length in (3, 5000, 200_000):
        x, y = np.full(length, 1.0), np.full(length, 2.0)
        work = comm.all_reduce_async(x, out=x)
        comm.all_reduce(y, out=y)
        assert work.done()
        comm.all_reduce(x, out=x)
        assert (x == comm.size**2).all() and (y == 2 * comm.size).all()


def test_ranks_may_mix_blocking_and_async_calls(comm):
    """Even ranks block, odd ones do not: the calls match all the same."""
    for step in range(40):
        x = np.full(2000, float(step))
        if (comm.rank + step) % 2:
            comm.all_reduce(x, out=x)
        else:
            comm.all_reduce_async(x, out=x).wait()
        assert (x == step * comm.size).all()


def test_many_in_flight(comm):
    arrays = [np.full(1 + step % 700, step, np.float32) for step in range(500)]
    works = [comm.all_reduce_async(x, "max", out=x) for x in arrays]
    gathered = comm.all_gather_async(np.array([comm.rank]))
    for step, (work, x) in enumerate(zip(works, arrays, strict=True)):
        assert work.wait() is x and (x == step).all()
    assert gathered.wait().tolist() == list(range(comm.size))


@pytest.mark.ranks(min=2)
def test_a_wait_can_time_out(comm):
    barrier = comm.barrier_async() if comm.rank else None
    if barrier is not None:
        start = time.monotonic()
        with pytest.raises(StallError, match=r"barrier: not done after 0.1 s"):
            barrier.wait(0.1)
        assert time.monotonic() - start < 1
        assert not barrier.done()
        comm.send(np.zeros(1), 0)  # messages do not queue behind it
    else:
        for peer in range(1, comm.size):
            comm.recv(np.zeros(1), peer)
        barrier = comm.barrier_async()
    assert barrier.wait() is None and barrier.done()


def test_invalid_arguments_raise_at_the_call(comm):
    with pytest.raises(UsageError):
        comm.all_reduce_async(np.ones(3), "avg")
    with pytest.raises(UsageError):
        comm.broadcast_async(np.ones(3), comm.size)
    comm.barrier()


def test_several_threads_wait_for_the_same_work(comm):
    work = comm.all_reduce_async(np.ones(1000))
    results = []
    threads = [threading.Thread(target=lambda: results.append(work.wait(30))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4 and all(result is results[0] for result in results)
    assert (results[0] == comm.size).all()


def test_several_threads_with_one_group_each(comm):
    """The threads' calls interleave differently on every rank, but each group sees its own in order."""
    groups = [comm.split(0) for _ in range(3)]
    errors = []

    def use(number, group):
        try:
            for step in range(60):
                x = np.full(100 * (number + 1), step)
                group.send_recv(x, (comm.rank + 1) % comm.size, out := np.empty_like(x), (comm.rank - 1) % comm.size)
                assert (out == step).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=pair) for pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_messages_and_collectives_at_the_same_time(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    inboxes = [np.zeros(2000) for _ in range(20)]
    receives = [comm.recv_async(inbox, left, tag=step) for step, inbox in enumerate(inboxes)]
    totals = [comm.all_reduce_async(np.full(2000, step)) for step in range(20)]
    sends = [comm.send_async(np.full(2000, float(step)), right, tag=step) for step in reversed(range(20))]
    for step, (receive, total) in enumerate(zip(receives, totals, strict=True)):
        assert (receive.wait() == step).all() and (total.wait() == step * comm.size).all()
    for send in sends:
        assert send.wait() is None


def test_arrays_are_kept_alive(comm):
    works = [comm.all_reduce_async(np.full(100_000, step)) for step in range(10)]
    junk = [np.full(100_000, -1) for _ in range(10)]  # would reuse the inputs' memory if it were free
    assert [int(work.wait().max()) for work in works] == [step * comm.size for step in range(10)]
    assert len(junk) == 10


def test_plans_keep_their_turn_among_other_calls(comm):
    x = np.ones(5000, np.float32)
    plan = comm.plan_all_reduce(x, out=x)
    works = [plan.start() for _ in range(3)]
    comm.barrier()
    plan()
    assert all(work.done() for work in works)
    assert (x == float(comm.size) ** 4).all()


@pytest.mark.parametrize("algorithm", ["auto", "recursive_doubling"])
def test_a_plan_makes_the_same_call_in_every_thread(comm, algorithm):
    """In the caller's thread it skipped, after 64 calls, the comparison that the progress thread still waited for."""
    x = np.ones(50, np.int64)
    plan = comm.plan_all_reduce(x, "max", out=x, algorithm=algorithm)
    for step in range(80):
        if (step + comm.rank) % 2:
            plan()
        else:
            plan.start().wait(30)
    assert (x == 1).all()
