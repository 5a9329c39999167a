"""split and node: members of each group, their order, nested groups, and many groups at once."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.errors import UsageError
from tests.bodies import checks


def exercise(group):
    checks.all_reduce(group, "float32", (5,))
    checks.all_reduce(group, "bfloat16", (5000,), "mean")
    checks.all_gather(group, "int16", (5,))
    checks.broadcast(group, "int16", (5,), root=group.size - 1)
    checks.send_recv(group, "int16", (5,))
    checks.objects(group)
    group.barrier()


def test_split_in_two(comm):
    group = comm.split(comm.rank % 2)
    assert (group.size, group.rank) == (len(range(comm.rank % 2, comm.size, 2)), comm.rank // 2)
    exercise(group)
    exercise(comm)


def test_order_by_key_then_rank(comm):
    assert comm.split(0, key=-comm.rank).rank == comm.size - 1 - comm.rank
    assert comm.split(0, key=7).rank == comm.rank
    assert comm.split(0, key=comm.rank // 2).rank == comm.rank
    assert comm.split(0, key=2**31 - 1 - comm.rank).rank == comm.size - 1 - comm.rank


def test_a_negative_color_joins_no_group(comm):
    group = comm.split(-1 if comm.rank else 3)
    assert (group is None) == (comm.rank > 0)
    if group is not None:
        assert group.size == 1
        exercise(group)
    assert comm.split(-5) is None


def test_group_of_one(comm):
    group = comm.split(comm.rank)
    assert (group.rank, group.size) == (0, 1)
    exercise(group)
    x = np.arange(3)
    assert group.all_reduce(x, algorithm="node").tolist() == [0, 1, 2]


def test_node(comm):
    node = comm.node()
    assert node.size == comm.size  # these tests run on one
    assert comm.node() is node
    exercise(node)


def test_nested_groups(comm):
    group, level = comm, 0
    while group.size > 1:
        half = group.split(group.rank * 2 // group.size)
        assert half.size < group.size
        exercise(half)
        group, level = half, level + 1
    assert group.name.count("split") == level
    exercise(comm)


def test_groups_work_at_the_same_time(comm):
    rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    works = [
        group.all_reduce_async(np.full(length, float(comm.rank)))
        for length in (3, 3000)
        for group in (rows, columns, comm)
    ]
    members = [
        [rank for rank in range(comm.size) if rank // 2 == comm.rank // 2],
        list(range(comm.rank % 2, comm.size, 2)),
        list(range(comm.size)),
    ]
    for work, ranks in zip(works, members * 2, strict=True):
        assert (work.wait() == sum(ranks)).all()


def test_groups_do_not_mix_their_messages(comm):
    """The same peers and tags in two groups and the world."""
    groups = [comm, comm.split(0), comm.split(0)]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    outs = [np.zeros(1) for _ in groups]
    receives = [group.recv_async(out, left) for group, out in zip(groups, outs, strict=True)]
    sends = [groups[i].send_async(np.array([float(i)]), right) for i in (2, 0, 1)]
    assert [float(receive.wait()[0]) for receive in receives] == [0, 1, 2]
    assert [send.wait() for send in sends] == [None] * 3


@pytest.mark.ranks(max=3)
def test_many_groups(comm):
    for step in range(25):
        group = comm.split(0)
        assert int(group.all_reduce(np.array([step]))[0]) == step * comm.size


def test_split_async_order(comm):
    """split runs after earlier launches."""
    work = comm.all_reduce_async(np.ones(3000))
    group = comm.split(0)
    assert work.done()
    assert group.size == comm.size


def test_a_root_outside_the_group_is_refused(comm):
    group = comm.split(comm.rank)
    with pytest.raises(UsageError, match=r"root is 1, but world\.split.* has the ranks 0 to 0"):
        group.broadcast(np.ones(1), 1)


@pytest.mark.parametrize("first", ["now", "started"])
def test_a_plan_created_before_its_group_has_memory(comm, first):
    """Its first run allocates that, and later runs take the short path; also with one in flight."""
    group = comm.split(0)
    x, out = np.empty(7, np.float32), np.empty((group.size, 7), np.float32)
    plan = group.plan_all_gather(x, out=out.reshape(-1))

    def check(step):
        assert (out == np.arange(group.size)[:, None] + step).all()
        out[:] = -1
        group.barrier()  # others may still read or write

    for step in range(6):
        x[:] = group.rank + step
        if (first == "started") == (step % 2 == 0):
            plan.start().wait()
        else:
            plan()
        check(step)
    x[:] = group.rank
    for work in [plan.start() for _ in range(3)]:
        work.wait()
    check(0)
