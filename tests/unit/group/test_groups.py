"""split, node and objects on faked nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bodies import checks
from tests.bodies.loopback import run


def exercise(group):
    checks.all_reduce(group, "float32", (5,))
    checks.all_reduce(group, "bfloat16", (3000,), "mean")
    checks.all_gather(group, "int16", (5,))
    checks.send_recv(group, "int16", (5,))
    group.barrier()


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2), st.integers(-3, 3)), min_size=1, max_size=5),
)
def test_splits_match_their_colors_and_keys(ranks):
    """Each rank has a node, a color and a key."""

    def check(comm):
        _, color, key = ranks[comm.rank]
        group = comm.split(color, key)
        if color < 0:
            assert group is None
        else:
            members = sorted((k, rank) for rank, (_, c, k) in enumerate(ranks) if c == color)
            assert (group.size, group.rank) == (len(members), members.index((key, comm.rank)))
            exercise(group)
            exercise(group.node())
        exercise(comm)

    run(len(ranks), check, nodes=[node for node, _, _ in ranks])


def test_node_groups_match_the_nodes():
    def check(comm):
        node = comm.node()
        assert (node.size, node.rank) == ([3, 2][comm.rank % 2], comm.rank // 2)
        assert comm.node() is node and node.node() is node
        exercise(node)

    run(5, check, nodes=[0, 1, 0, 1, 0])


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1]])
def test_unpicklable_objects_are_refused_before_anything_is_sent(nodes):
    """The others once waited for ever for the length of an object that the root could not pickle."""

    def check(comm):
        for verb in (comm.broadcast_object, comm.broadcast_object_async):
            if comm.rank == 0:
                with pytest.raises(Exception, match="pickle"):
                    verb(lambda: 0)
        with pytest.raises(Exception, match="pickle"):
            comm.all_gather_object(lambda: 0)
        assert comm.broadcast_object(comm.rank + 5) == 5

    run(3, check, nodes=nodes)


def test_an_object_is_pickled_at_the_call():
    def check(comm):
        value = [comm.rank]
        works = [comm.broadcast_object_async(value), comm.all_gather_object_async(value)]
        value.append(99)
        assert works[0].wait() == [0]
        assert works[1].wait() == [[0], [1]]

    run(2, check)


def test_the_shutdown_ignores_a_closed_group():
    """Shutting down after a close marked the rank as left on the closed group's board, and raised IndexError."""

    def check(comm):
        group = comm.split(0)
        group.all_reduce(np.ones(3))
        group.barrier()
        group.close()
        comm.barrier()
        assert comm.runtime.drain(5) == "" and comm.runtime.end() == ""

    run(2, check)
