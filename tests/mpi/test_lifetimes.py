"""Lifetimes of arrays: queued operations and those in flight keep theirs alive, whatever the user drops."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from tests.oracles.poison import poisoned

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_ranks]

COUNTS = [10, 1100, 100_000]


def late(comm):
    """Let the others start first, one after the other."""
    time.sleep(0.02 * comm.rank)


def started(comm, verb, count):
    """Start `verb` on arrays that nobody else references, and return its Work."""
    x = poisoned(np.arange(count, dtype=np.float64) + comm.rank)
    rows = poisoned(np.arange(count * comm.size, dtype=np.float64) + comm.rank)
    match verb:
        case "all_reduce" | "all_gather" | "broadcast":
            return getattr(comm, f"{verb}_async")(x)
        case "all_reduce in place":
            return comm.all_reduce_async(x, out=x)
        case "all_reduce by a schedule":
            return comm.all_reduce_async(x, algorithm="ring")
        case "reduce" | "gather":
            return getattr(comm, f"{verb}_async")(x, root=0)
        case "scatter":
            return comm.scatter_async(rows, root=0)
        case "reduce_scatter" | "all_to_all":
            return getattr(comm, f"{verb}_async")(rows)
        case "all_gather_v":
            return comm.all_gather_v_async(x[: count - comm.rank])
        case "all_to_all_v":
            return comm.all_to_all_v_async(rows, [count] * comm.size)
        case "plan":
            return comm.plan_all_reduce(x).start()
        case "plan in place":
            return comm.plan_all_reduce(x, out=x).start()
        case "plan of a schedule":
            return comm.plan_all_reduce(x, algorithm="ring").start()


def expected(comm, verb, count):
    """Return the result of `started` on this rank."""
    first, rank, size = np.arange(count, dtype=np.float64), comm.rank, comm.size
    whole = np.arange(count * size, dtype=np.float64)
    mine = slice(count * rank, count * (rank + 1))
    total = size * first + sum(range(size))
    match verb:
        case "broadcast":
            return first
        case "all_gather":
            return np.concatenate([first + peer for peer in range(size)])
        case "gather":
            return np.concatenate([first + peer for peer in range(size)]) if rank == 0 else None
        case "reduce":
            return total if rank == 0 else None
        case "scatter":
            return whole[mine]
        case "reduce_scatter":
            return (size * whole + sum(range(size)))[mine]
        case "all_to_all" | "all_to_all_v":
            return np.concatenate([whole[mine] + peer for peer in range(size)])
        case "all_gather_v":
            return np.concatenate([(first + peer)[: count - peer] for peer in range(size)])
    return total


VERBS = [
    "all_reduce",
    "all_reduce in place",
    "all_reduce by a schedule",
    "reduce_scatter",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_v",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_v",
    "plan",
    "plan in place",
    "plan of a schedule",
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("verb", VERBS)
def test_arrays_that_the_user_drops(comm, verb, count):
    """A started plan read freed memory: wrong sums, and SIGSEGV with large arrays."""
    for _ in range(3):
        late(comm)
        work = started(comm, verb, count)
        gc.collect()
        result = work.wait()
        if isinstance(result, tuple):
            result = result[0]
        correct = expected(comm, verb, count)
        if correct is None:
            assert result is None
        else:
            np.testing.assert_array_equal(result, correct)
        del work, result


@pytest.mark.parametrize("count", COUNTS)
def test_symmetric_arrays_that_the_user_drops(comm, count):
    """A later `empty` returns their memory; that must not happen while an operation still uses it."""
    for step in range(3):
        x = comm.empty(count, "float64")
        x[:] = comm.rank + step
        late(comm)
        works = [comm.plan_all_reduce(x, out=x).start(), comm.all_reduce_async(x, out=x)]
        del x
        comm.empty(count, "float64")[:] = -1.0
        assert (works[1].wait() == comm.size * (comm.size * step + sum(range(comm.size)))).all()


@pytest.mark.parametrize("count", COUNTS)
def test_messages_that_the_user_drops(comm, count):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    receive = comm.recv_async(poisoned(np.zeros(count)), left)
    late(comm)
    send = comm.send_async(poisoned(np.full(count, float(comm.rank))), right)
    gc.collect()
    assert (receive.wait() == left).all() and send.wait() is None


@pytest.mark.parametrize("count", COUNTS)
def test_arrays_of_works_without_a_wait(comm, count):
    """Dropped together with their works: later calls must find the same data on all ranks."""
    x = np.ones(count)
    for step in range(5):
        late(comm)
        comm.plan_all_reduce(poisoned(np.full(count, float(step)))).start()
        comm.all_gather_async(poisoned(np.full(count, float(step))))
        gc.collect()
        assert (comm.all_reduce(x) == comm.size).all()
