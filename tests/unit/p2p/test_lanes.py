"""Messages on a node, between threads."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.config import Config
from commlib.errors import MismatchError
from commlib.kernels.host import lane_take
from commlib.p2p import lane_in
from tests import lanes
from tests.loopback import run


@pytest.mark.parametrize("check", lanes.CHECKS, ids=lambda check: check.__name__)
def test_on_a_node(check):
    run(2, check, config=Config(timeout=20))


@pytest.mark.parametrize("check", lanes.CHECKS, ids=lambda check: check.__name__)
def test_on_two_nodes_of_two(check):
    """Ranks 0 and 1 share a node that has another one beside it."""
    run(3, check, nodes=[0, 0, 1], config=Config(timeout=20))


@pytest.mark.parametrize(
    ("nodes", "node_path"), [([0, 1], True), ([0, 0], False)], ids=["two nodes", "no shared memory"]
)
def test_without_shared_memory_there_is_no_lane(nodes, node_path):
    def work(comm):
        peer, out = 1 - comm.rank, np.zeros(3)
        comm.send_recv(np.full(3, comm.rank), peer, np.zeros(3, int), peer)
        assert (comm.send_recv(np.full(3, 1.0 + comm.rank), peer, out, peer) == 1 + peer).all()
        assert not comm._post._out and not comm._post._in

    run(2, work, nodes=nodes, config=Config(node_path=node_path, timeout=10))


def test_a_lane_is_made_by_the_first_message_in_its_direction():
    def work(comm):
        group = comm.split(0)
        assert not group._post._out and not group._post._in and "mailbox" not in vars(group._post._letters)
        comm.send(np.ones(1), 1) if comm.rank == 0 else comm.recv(np.zeros(1), 0)
        comm.barrier()
        assert (list(comm._post._out), list(comm._post._in)) == (([1], []) if comm.rank == 0 else ([], [0]))
        assert not group._post._out and not group._post._in

    run(2, work)


def test_two_that_follow_a_sender_from_ring_to_ring(monkeypatch):
    """Whoever had seen a ring's end, and was late, took the next one, where the other was, for empty as well."""
    many, wanted = 3000, []

    def work(comm):
        if comm.rank == 0:
            for step in range(many):
                comm.send(np.full(200, step), 1)
            comm.barrier()
            return
        work = comm.recv_async(np.zeros(200, int), 0)
        comm.barrier()
        lane, look = comm._post._in[0], lane_in._look

        def look_and_be_late(at):
            status = look(at)
            if status == lane_take.DRAINED:
                wanted.append(status)
                monkeypatch.setattr(lane_in, "_look", look)
                lane.look()  # as another thread, or a signal handler
                monkeypatch.setattr(lane_in, "_look", look_and_be_late)
            return status

        monkeypatch.setattr(lane_in, "_look", look_and_be_late)
        for step in range(many):
            assert (work.wait(20) == step).all(), step
            work = comm.recv_async(np.zeros(200, int), 0) if step + 1 < many else None

    run(2, work, config=Config(timeout=20))
    assert wanted


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_groups_that_are_made_after_a_mismatch(nodes):
    """The rank that had called split counted one group more, so that each took the other's letters for old ones."""

    def work(comm):
        with pytest.raises(MismatchError):
            comm.split(0) if comm.rank == 0 else comm.barrier()
        group = comm.split(0)
        peer, out = 1 - comm.rank, np.zeros(3)
        assert (group.send_recv(np.full(3, 1.0 + comm.rank), peer, out, peer) == 1 + peer).all()
        return group.name

    names = run(2, work, nodes=nodes, config=Config(timeout=10))
    assert names[0] == names[1]
