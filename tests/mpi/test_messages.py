"""send, recv, send_recv: matching by peer and tag, in order; messages of all sizes; errors."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.errors import MismatchError, StallError, UsageError
from commlib.transport.mpi import MpiTransport

pair = pytest.mark.ranks(min=2)


def ping(comm, function):
    """Run `function(first)` on ranks 0 and 1; the others wait."""
    try:
        if comm.rank < 2:
            function(comm.rank == 0)
    finally:
        comm.barrier()  # in step even after a failure


@pair
@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_000])
def test_there_and_back(comm, count):
    def check(first):
        x = np.arange(count, dtype=np.float32)
        if first:
            comm.send(x, 1)
            assert (comm.recv(np.empty_like(x), 1) == 2 * x).all()
        else:
            comm.send(2 * comm.recv(np.empty_like(x), 0), 0)

    ping(comm, check)


@pair
def test_tags_are_matched_out_of_order(comm):
    def check(first):
        if first:
            works = [comm.send_async(np.array([tag]), 1, tag) for tag in (5, 32767, 0)]
            for work in works:
                work.wait()
        else:
            assert [int(comm.recv(np.zeros(1, int), 0, tag)[0]) for tag in (0, 5, 32767)] == [0, 5, 32767]

    ping(comm, check)


@pair
def test_messages_of_one_tag_keep_their_order(comm):
    def check(first):
        if first:
            for step in range(200):
                comm.send(np.full(1 + step, step), 1)
        else:
            for step in range(200):
                assert (comm.recv(np.zeros(1 + step, int), 0) == step).all()

    ping(comm, check)


def test_exchange_with_oneself(comm):
    out = np.zeros(100_000)
    assert comm.send_recv(np.ones(100_000), comm.rank, out, comm.rank) is out
    receive = comm.recv_async(np.zeros(3), comm.rank, 4)
    comm.send(np.arange(3.0), comm.rank, 4)
    assert receive.wait().tolist() == [0, 1, 2]


def test_all_exchange_at_once(comm):
    """Large blocking exchanges in a ring: no deadlock."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(3):
        out = np.empty(1_000_000)
        comm.send_recv(np.full(1_000_000, float(comm.rank)), right, out, left)
        assert (out == left).all()


@pair
@pytest.mark.parametrize("count", [2, 6], ids=["shorter", "longer"])
def test_a_message_of_the_wrong_length_is_a_mismatch(comm, count):
    """Large ones are in tests/launch: Open MPI may crash on them."""

    def check(first):
        if first:
            comm.send(np.ones(count), 1)
        else:
            with pytest.raises(MismatchError, match=r"recv from rank 0.*on rank 1: expected 32 bytes"):
                comm.recv(np.ones(4), 0)

    ping(comm, check)
    ping(comm, lambda first: comm.send(np.ones(1), 1) if first else comm.recv(np.ones(1), 0))


@pair
def test_a_receive_without_a_sender_can_be_waited_for_repeatedly(comm):
    def check(first):
        if first:
            comm.recv(np.zeros(1), 1, 9)
            comm.send(np.full(1, 3.0), 1)
        else:
            work = comm.recv_async(np.zeros(1), 0)
            with pytest.raises(StallError, match=r"recv from rank 0, tag 0: not done after 0.1 s"):
                work.wait(0.1)
            assert not work.done()
            comm.send(np.zeros(1), 0, 9)
            assert work.wait()[0] == 3.0 and work.done()

    ping(comm, check)


@pair
def test_a_refused_exchange_leaves_no_receive_behind(comm):
    def check(first):
        if first:
            out, later = np.zeros(2), np.zeros(2)
            with pytest.raises(UsageError):
                comm.send_recv("not an array", 1, out, 1)
            with pytest.raises(UsageError):
                comm.send_recv(np.ones(2), comm.size, out, 1)
            assert comm.recv(later, 1).tolist() == [5, 5]
            assert out.tolist() == [0, 0]
        else:
            comm.send(np.full(2, 5.0), 0)

    ping(comm, check)


@pair
def test_messages_progress_while_the_groups_thread_waits_in_a_collective(comm):
    """Rank 0 enters the barrier after its large message has been received; nobody waits for that on rank 1."""
    into = np.empty(100_000)
    if comm.rank == 1:
        receive = comm.recv_async(into, 0)
        comm.barrier_async().wait(60)
        receive.wait(60)
        assert (into == 7).all()
    else:
        if comm.rank == 0:
            comm.send(np.full(100_000, 7.0), 1)
        comm.barrier()


def test_overlapping_exchange_is_refused(comm):
    """MPI does not define sending from the memory that is received into."""
    memory = np.arange(10.0)
    for x, out in ((memory[:6], memory[4:]), (memory, memory)):
        with pytest.raises(UsageError, match="overlap"):
            comm.send_recv(x, comm.rank, out, comm.rank)
    comm.barrier()


@pair
@pytest.mark.parametrize("sent", [0, 5, 63, 64, 65, 127, 128, 129, 192, 640])
@pytest.mark.parametrize("wanted", [64, 128, 100])
def test_messages_in_several_pieces(comm, sent, wanted):
    """A recv of exactly one piece (1 GiB) accepted a message of two, and the next recv got the rest of it."""
    pieces = MpiTransport(comm.native.Dup(), longest=64)
    if comm.rank == 0:
        requests = [pieces.send(1, 5, memoryview(bytes(range(256)) * 3)[:sent]), pieces.send(1, 5, memoryview(b"next"))]
        pieces.wait(requests, lambda: None)
    elif comm.rank == 1:
        first, second = bytearray(wanted), bytearray(4)
        requests = [pieces.recv_probed(0, 5, memoryview(first)), pieces.recv_probed(0, 5, memoryview(second))]
        pieces.wait(requests, lambda: None)
        assert requests[0].nbytes == (sent if sent <= wanted else -1)
        assert second == b"next" and requests[1].nbytes == 4
        assert sent > wanted or first[:sent] == (bytes(range(256)) * 3)[:sent]
    comm.barrier()
    pieces.close()


@pair
@pytest.mark.parametrize("nbytes", [63, 64, 128, 200])
def test_pieces_of_known_length(comm, nbytes):
    pieces = MpiTransport(comm.native.Dup(), longest=64)
    if comm.rank == 0:
        pieces.wait([pieces.send(1, 5, memoryview(bytes(range(nbytes))))], lambda: None)
    elif comm.rank == 1:
        into = bytearray(nbytes)
        ended = pieces.wait_any([pieces.recv(0, 5, memoryview(into))], lambda: None)
        assert into == bytes(range(nbytes)) and ended[0].nbytes == nbytes
    comm.barrier()
    pieces.close()
