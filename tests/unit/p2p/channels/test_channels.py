"""Channels between ranks that are threads: on one node, and on two."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.buffers.peer_memory import PeerMemory
from commlib.config.settings import Config
from commlib.errors import PeerError, StallError, TransportError, UsageError
from commlib.p2p.channels import outbox, posted_end
from commlib.transport.loopback import LoopbackTransport
from tests.bodies import channels
from tests.bodies.loopback import run

layouts = pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=["node", "messages"])


@layouts
@pytest.mark.parametrize("check", channels.ALL, ids=lambda check: check.__name__)
def test_every_channel_passes_the_checks(nodes, check):
    run(2, lambda comm: check(comm, 1 - comm.rank), nodes=nodes)


@layouts
def test_a_failed_group_fails_its_channels(nodes):
    run(2, lambda comm: channels.a_failed_group(comm, 1 - comm.rank), nodes=nodes)


def test_messages_may_exceed_one_request(monkeypatch):
    """Data beyond one request of 256 bytes follows under another tag."""
    monkeypatch.setattr(posted_end, "LONGEST", 256)

    def check(comm):
        channel = comm.channel(1 - comm.rank, "long", (10,), "int64", 2)
        for count in (0, 10, 3, 1000, 2000, 1, 5000):
            for _ in range(2):
                channel.send(np.arange(count) + comm.rank)
            for _ in range(2):
                assert (channel.recv() == np.arange(count) + 1 - comm.rank).all()
            channel.release()

    run(2, check, nodes=[0, 1])


def test_memory_that_the_receiver_has_not_mapped_is_not_withdrawn(monkeypatch):
    """The poller may look after a long message while the thread that sends another one does."""
    outgoing: list[Any] = []

    class Withdrawn(PeerMemory):
        def withdraw(self):
            outgoing[0].tidy()  # as another thread in the middle of it would
            super().withdraw()

    monkeypatch.setattr(outbox, "PeerMemory", Withdrawn)

    def check(comm):
        channel = comm.channel(1 - comm.rank, "long", (1,), "int64", 2)
        if comm.rank == 0:
            outgoing.append(channel.ends.outgoing)
            channel.send(np.arange(10_000))
            channel.send(np.arange(90_000))
        comm.barrier()
        for count in (10_000, 90_000):
            if comm.rank == 1:
                assert (channel.recv() == np.arange(count)).all()
            comm.barrier()
            outgoing[0].tidy()
            comm.barrier()

    run(2, check, nodes=[0, 0])


@layouts
def test_the_timeout_of_all_waits_fails_the_channel(nodes):
    gave_up = threading.Event()

    def check(comm):
        channel = comm.channel(1 - comm.rank, "late", (1,), "int8")
        if comm.rank == 0:
            with pytest.raises(StallError, match=r"world: recv on channel 'late' with rank 1: rank 0: gave up after"):
                channel.recv()
            with pytest.raises(StallError):
                channel.send(np.zeros(1, np.int8))
            gave_up.set()
        else:
            assert gave_up.wait(20)  # as long as a loaded machine takes
            with pytest.raises(PeerError, match=r"rank 0 has given up this channel \(StallError: .*gave up after"):
                channel.recv()

    run(2, check, nodes=nodes, config=Config(timeout=1.5))  # rank 1 must see the failure before its own timeout


def test_an_mpi_with_few_tags_is_reported(monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "tags", 64)

    def check(comm):
        with pytest.raises(TransportError, match="this MPI has 64 tags for channels, too few for another of world"):
            comm.channel(1 - comm.rank, 0, (3,))
        comm.barrier()

    run(2, check, nodes=[0, 1])


def test_dropped_channels_release_memory_and_notify_the_peer():
    def check(comm):
        peer = 1 - comm.rank
        before = descriptors()
        for edge in range(40):
            channel = comm.channel(peer, edge, (10_000,))
            channel.send(np.ones(10_000, np.float32))
            view = channel.recv()
            if comm.rank == 0 and edge == 39:
                break
            del channel
        comm.barrier()
        assert view.sum() == 10_000  # memory of a freed channel
        if comm.rank == 1:
            kept = comm.channel(peer, "kept", (1,))
            comm.barrier()
            with pytest.raises(PeerError, match="has dropped this channel"):
                kept.recv()
        else:
            kept = comm.channel(peer, "kept", (1,))
            comm.barrier()
            del kept
            gc.collect()
        last = comm.channel(peer, "last", (1,))  # sweeps
        last.send(np.ones(1, np.float32))
        last.recv()
        comm.barrier()
        comm.channel(peer, "sweep", (1,))
        assert descriptors() < before + 20

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    run(2, check)
    gc.collect()


def test_no_file_remains():
    assert not list(Path("/dev/shm").glob(f"commlib-{os.getpid()}-*"))


def test_handlers_are_refused_in_the_middle_of_a_send(monkeypatch):
    """A larger message allocates memory; a signal arrives there, and its handler sends."""
    opened: dict[int, Any] = {}  # by the rank's thread
    refused: list[int] = []

    def memory(*arguments, **options):
        with pytest.raises(UsageError, match="called during another send on the same channel"):
            opened[threading.get_ident()].send(np.zeros(3, np.float32))
        refused.append(threading.get_ident())
        return PeerMemory(*arguments, **options)

    def check(comm):
        channel = opened[threading.get_ident()] = comm.channel(1 - comm.rank, "nested", (3,))
        channel.send(np.zeros(3, np.float32))
        channel.recv()
        comm.barrier()
        monkeypatch.setattr(outbox, "PeerMemory", memory)
        comm.barrier()
        channel.send(np.ones(4000, np.float32))
        channel.release()
        assert (channel.recv() == np.ones(4000)).all()

    run(2, check)
    assert sorted(refused) == sorted(opened)
