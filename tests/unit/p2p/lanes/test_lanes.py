"""Messages on a node, between threads."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.config.settings import Config
from commlib.errors import MismatchError
from commlib.kernels.fields import shm_ring
from commlib.p2p.lanes import receiver as lane_in
from commlib.p2p.lanes.receiver import RingReceiver
from commlib.transport.base import Space
from commlib.transport.loopback import LoopbackTransport
from tests.bodies import lanes
from tests.bodies.loopback import run
from tests.oracles.resources import count_resources, mappings


@pytest.mark.parametrize("check", lanes.CHECKS, ids=lambda check: check.__name__)
def test_lanes_work_on_a_node(check):
    run(2, check, config=Config(timeout=20))


@pytest.mark.parametrize("check", lanes.CHECKS, ids=lambda check: check.__name__)
def test_lanes_work_on_two_nodes_of_two(check):
    """Ranks 0 and 1 share a node, ranks 2 and 3 another one."""
    run(3, check, nodes=[0, 0, 1], config=Config(timeout=20))


@pytest.mark.parametrize(
    ("nodes", "node_path"), [([0, 1], True), ([0, 0], False)], ids=["two nodes", "no shared memory"]
)
def test_without_shared_memory_there_is_no_lane(nodes, node_path):
    before = count_resources().mappings

    def work(comm):
        peer, out = 1 - comm.rank, np.zeros(3)
        comm.send_recv(np.full(3, comm.rank), peer, np.zeros(3, int), peer)
        assert (comm.send_recv(np.full(3, 1.0 + comm.rank), peer, out, peer) == 1 + peer).all()
        assert mappings() == before
        comm.barrier()

    run(2, work, nodes=nodes, config=Config(node_path=node_path, timeout=10))


def test_a_lane_is_made_by_the_first_message_in_its_direction(monkeypatch):
    """Its memory is mapped twice, by its writer and by its reader; a rank that sends nothing has no mailbox."""
    of_letters, before = [], count_resources().mappings
    space = LoopbackTransport.space

    def spied(transport, which):
        if which is Space.CHANNELS:
            of_letters.append(transport)
        return space(transport, which)

    monkeypatch.setattr(LoopbackTransport, "space", spied)

    def work(comm):
        group = comm.split(0)
        comm.barrier()
        assert mappings() == before and not of_letters
        comm.barrier()
        comm.send(np.ones(1), 1) if comm.rank == 0 else comm.recv(np.zeros(1), 0)
        comm.barrier()
        assert mappings() == before + 2
        assert len(of_letters) == 2 and group.group.transport not in of_letters
        comm.barrier()
        comm.recv(np.zeros(1), 1) if comm.rank == 0 else comm.send(np.ones(1), 0)
        comm.barrier()
        assert mappings() == before + 4
        assert len(of_letters) == 2
        comm.barrier()

    run(2, work)


def test_two_readers_follow_a_sender_from_ring_to_ring(monkeypatch):
    """A late reader that had seen a ring's end took the next ring, in use by the other reader, for empty as well."""
    many, wanted, lanes_at = 3000, [], {}
    look = RingReceiver.look

    def remember(lane):
        lanes_at[lane.at] = lane
        look(lane)

    monkeypatch.setattr(RingReceiver, "look", remember)

    def work(comm):
        if comm.rank == 0:
            for step in range(many):
                comm.send(np.full(200, step), 1)
            comm.barrier()
            return
        work = comm.recv_async(np.zeros(200, int), 0)
        comm.barrier()
        look_into = lane_in.look_into

        def look_and_be_late(at):
            status = look_into(at)
            if status == shm_ring.DRAINED:
                wanted.append(status)
                monkeypatch.setattr(lane_in, "look_into", look_into)
                lanes_at[at].look()  # as another thread, or a signal handler
                monkeypatch.setattr(lane_in, "look_into", look_and_be_late)
            return status

        monkeypatch.setattr(lane_in, "look_into", look_and_be_late)
        for step in range(many):
            assert (work.wait(20) == step).all(), step
            work = comm.recv_async(np.zeros(200, int), 0) if step + 1 < many else None

    run(2, work, config=Config(timeout=20))
    assert wanted


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["one node", "two nodes"])
def test_groups_created_after_a_mismatch_work(nodes):
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
