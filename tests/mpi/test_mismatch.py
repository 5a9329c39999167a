"""Ranks that make different calls: all raise a MismatchError with ranks and calls, and the group remains usable."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.errors import MismatchError
from tests.bodies import checks

pytestmark = pytest.mark.ranks(min=2)

X = np.ones(6)

# (what most ranks call, what the last rank calls, a word of each in the message)
CASES = {
    "count": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(4)), "3 x", "4 x"),
    "large count": (lambda c: c.all_reduce(np.ones(3000)), lambda c: c.all_reduce(np.ones(9000)), "3000 x", "9000 x"),
    "small and large": (lambda c: c.all_reduce(np.ones(3)), lambda c: c.all_reduce(np.ones(9000)), "3 x", "9000 x"),
    "dtype": (lambda c: c.all_reduce(X), lambda c: c.all_reduce(X.astype("f4")), "float64", "float32"),
    "same width": (
        lambda c: c.all_reduce(X.astype("float16")),
        lambda c: c.all_reduce(X.astype("int16")),
        "float16",
        "int16",
    ),
    "op": (lambda c: c.all_reduce(X), lambda c: c.all_reduce(X, "max"), "op=sum", "op=max"),
    "algorithm": (
        lambda c: c.all_reduce(X, algorithm="ring"),
        lambda c: c.all_reduce(X, algorithm="bruck"),
        "ring",
        "bruck",
    ),
    "node and schedule": (lambda c: c.all_reduce(X), lambda c: c.all_reduce(X, algorithm="ring"), "auto", "ring"),
    "verb": (lambda c: c.all_reduce(X), lambda c: c.broadcast(X.copy()), "all_reduce", "broadcast"),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_reduce(X), "barrier", "all_reduce"),
    "root": (lambda c: c.broadcast(X.copy(), 0), lambda c: c.broadcast(X.copy(), 1), "root=0", "root=1"),
    "reduce root": (lambda c: c.reduce(X, root=0), lambda c: c.reduce(X, root=1), "root=0", "root=1"),
    "all_gather shape": (lambda c: c.all_gather(X), lambda c: c.all_gather(X.reshape(2, 3)), "(6,)", "(2, 3)"),
    "all_gather_v row": (
        lambda c: c.all_gather_v(np.ones((2, 3))),
        lambda c: c.all_gather_v(np.ones((3, 2))),
        "3)",
        "2)",
    ),
    "all_to_all": (
        lambda c: c.all_to_all(np.ones(c.size)),
        lambda c: c.all_to_all(np.ones(2 * c.size)),
        "all_to_all",
        "float64",
    ),
    "empty shape": (lambda c: c.empty(3), lambda c: c.empty(4), "(3,)", "(4,)"),
    "objects": (lambda c: c.broadcast_object(1), lambda c: c.all_gather_object(1), "broadcast_object", "all_gather"),
    "split": (lambda c: c.split(0), lambda c: c.barrier(), "split", "barrier"),
    "async": (lambda c: c.all_reduce_async(X).wait(), lambda c: c.barrier_async().wait(), "all_reduce", "barrier"),
}


@pytest.mark.parametrize("case", CASES)
def test_mismatch(comm, case):
    usual, odd, first, second = CASES[case]
    last = comm.size - 1
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            (odd if comm.rank == last else usual)(comm)
        text = str(caught.value)
        assert first in text and second in text
        assert f"this is rank {comm.rank}" in text and f"rank {last}: " in text
        assert "same calls in the same order" in text
        # Usable afterwards, by every path.
        checks.all_reduce(comm, "float32", (5,))
        checks.all_reduce(comm, "float32", (5000,))
        checks.all_gather(comm, "int8", (3,))


def test_every_rank_makes_a_different_call(comm):
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(np.ones(1 + comm.rank))
    for rank in range(comm.size):
        assert f"rank {rank}: all_reduce of {1 + rank} x float64" in str(caught.value)
    checks.all_reduce(comm, "float32", (5,))


def _mixed_memory(comm, count):
    """Return arrays that are symmetric on some ranks and ordinary on others; and symmetric ones in different places."""
    x = comm.empty(count + 1000)
    yield x[:count] if comm.rank else np.zeros(count, np.float32)
    yield np.zeros(count, np.float32) if comm.rank == comm.size - 1 else x[:count]
    yield x[:count] if comm.rank else x[1000:]


def test_all_reduce_in_memory_that_does_not_correspond(comm):
    """All ranks see that their arrays are in different places, and all use the slots instead."""
    for x in _mixed_memory(comm, 200_000):
        for _ in range(3):
            x[:] = comm.rank + 1
            comm.all_reduce(x, out=x)
            assert (x == comm.size * (comm.size + 1) // 2).all()
            work = comm.all_reduce_async(x, "mean", out=x)
            assert (work.wait() == comm.size * (comm.size + 1) // 2).all()


def test_other_verbs_in_memory_that_does_not_correspond(comm):
    size = comm.size
    for x in _mixed_memory(comm, 30_000 * size):
        x[:] = comm.rank + 1
        expected = np.repeat(np.arange(1, size + 1), 30_000)
        assert (comm.all_gather(x[:30_000]) == expected).all()
        assert (comm.all_to_all(x) == expected).all()
        assert (comm.reduce_scatter(x, "max") == size).all()
        total = comm.reduce(x, root=size - 1)
        assert total is None or (total == size * (size + 1) // 2).all()
        comm.broadcast(x, size - 1)
        assert (x == size).all()


def test_a_mismatch_writes_nothing(comm):
    x = np.full(9000 - comm.rank, 7.0)
    with pytest.raises(MismatchError):
        comm.all_reduce(x, out=x)
    assert (x == 7).all()


def test_a_mismatch_among_works_in_flight_fails_alone(comm):
    x = np.ones(100)
    works = [comm.all_reduce_async(x) for _ in range(3)]
    odd = comm.all_reduce_async(x, "max" if comm.rank == 0 else "min")
    works += [comm.all_reduce_async(x) for _ in range(3)]
    assert isinstance(odd.exception(), MismatchError)
    assert all((work.wait() == comm.size).all() for work in works)


def test_a_mismatch_in_a_group_names_the_group(comm):
    group = comm.split(0)
    with pytest.raises(MismatchError, match=r"world\.split\d+\(0\): the ranks do not make the same call"):
        group.all_reduce(np.ones(1 + comm.rank))
    comm.barrier()


def test_calls_are_counted_as_the_user_makes_them(comm):
    """A script's first collective was "call number 4": internal calls were counted."""
    group = comm.split(0)
    calls = [
        lambda: group.all_reduce(X),
        lambda: group.all_reduce(X),
        lambda: group.all_reduce(np.ones(300_000)),
        lambda: group.all_gather_v(X),
        lambda: group.broadcast_object("x"),
        lambda: group.barrier(),
        lambda: group.all_reduce(X, algorithm="ring"),
        lambda: group.plan_all_reduce(np.ones(5))(),
        lambda: group.all_reduce_async(X).wait(),
        lambda: group.split(0),
    ]
    for number in range(len(calls) + 1):
        if number:
            calls[number - 1]()
        with pytest.raises(MismatchError, match=rf"call number {2 * number + 1}; this is rank {comm.rank}"):
            group.all_reduce(np.ones(1 + comm.rank))
