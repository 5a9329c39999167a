"""send, recv and send_recv of a device's arrays: through host memory on a node, else directly where MPI can.

With the node path off, ranks of one node send each other messages as if they were on two.
"""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

import commlib
from commlib.communicator import Communicator
from commlib.config.settings import Config
from commlib.dtypes import DTYPES
from commlib.errors import MismatchError, StallError, UsageError
from commlib.runtime.process import Runtime
from commlib.transport.mpi import MpiTransport
from tests.bodies import checks
from tests.bodies.device_paths import count
from tests.late import LATE, OnDevice
from tests.oracles.poison import poisoned

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_ranks]

pair = pytest.mark.ranks(min=2)


@pytest.fixture(scope="module", params=["node", "pieces", "staged", "direct"])
def comm(request):
    """All ranks: on a node, with device memory acceptable to MPI; and as if between nodes, without and with that.

    On a node also in pieces of 3 KiB.
    """
    world = commlib.init()
    devices = set() if request.param == "staged" else {"late"}
    pieces = 3 if request.param == "pieces" else 2048
    settings = Config(timeout=20, node_path=request.param in ("node", "pieces"), staging_kib=pieces)
    runtime = Runtime(settings, world.runtime.ranks_on_node)
    transport = MpiTransport(world.native.Dup(), longest=1 << 16, devices=devices)
    group = Communicator(
        transport, runtime, f"messages {request.param}"
    )  # names are unique: MPICH mixes up messages of equal names
    yield group
    group.close()


@pytest.fixture
def slowly(monkeypatch):
    monkeypatch.setattr(LATE, "delay", 0.03)


def is_direct(comm, peer):
    return comm.group.transport.accepts("late") and (peer == comm.rank or not comm.config.node_path)


def ping(comm, function):
    """Run `function(first)` on ranks 0 and 1; the others wait."""
    try:
        if comm.rank < 2:
            function(comm.rank == 0)
    finally:
        comm.barrier()


@pytest.mark.parametrize("dtype", DTYPES[::4])
@pytest.mark.parametrize("shape", [(), (0,), (5, 3), (70_000,)])
def test_all_kinds(comm, dtype, shape):
    for caller in (OnDevice(comm), OnDevice(checks.Twins(comm))):
        checks.send_recv(caller, dtype, shape)
        checks.send_and_recv(caller, dtype, shape, tag=7)


@pair
def test_messages_take_the_expected_path(comm):
    x, out = LATE.put(np.full(5000, comm.rank + 1.0)), LATE.empty((5000,), "float64")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    counted = count(comm, lambda: comm.send_recv(x, right, out, left))
    pieces = math.ceil(5000 * 8 / (comm.config.staging_kib * 1024)) if comm.config.node_path else 1
    expected = (0, 2 * comm.size) if is_direct(comm, right) else (2 * comm.size * pieces, 0)
    assert (counted.copies, counted.messages) == expected
    assert is_direct(comm, right) == (comm.group.transport.accepts("late") and not comm.config.node_path)


@pair
@pytest.mark.parametrize("device_side", ["sends", "receives"])
def test_one_side_on_the_host_the_other_on_a_device(comm, device_side):
    x, out = np.arange(5000.0), np.zeros(5000)

    def check(first):
        if first:
            comm.send(LATE.put(x) if device_side == "sends" else x, 1)
        elif device_side == "sends":
            assert comm.recv(out, 0) is out
            np.testing.assert_array_equal(out, x)
        else:
            np.testing.assert_array_equal(comm.recv(LATE.empty((5000,), "float64"), 0).numpy(), x)

    ping(comm, check)


@pair
def test_pieces_are_copied_and_sent_in_parallel(comm, monkeypatch):
    """They leave the device one by one, as slow as it is, and enter the other one as they arrive."""
    if comm.config.staging_kib > 3:
        pytest.skip("it goes as a whole")
    delay, pieces, moved, copy, send = 0.02, 10, [], LATE.copy, MpiTransport.send

    def copying(target, source):
        if isinstance(source, np.ndarray):
            moved.append(time.monotonic())
        copy(target, source)

    def sending(transport, *message):
        moved.append(time.monotonic())
        return send(transport, *message)

    def check(first):
        x = np.arange(pieces * 3 * 1024 // 8, dtype=np.float64)
        if first:
            on_device = LATE.put(x)
            LATE.synchronise()
            with monkeypatch.context() as patch:
                patch.setattr(LATE, "delay", delay)
                patch.setattr(MpiTransport, "send", sending)
                comm.send(on_device, 1)
        else:
            out = LATE.empty(x.shape, "float64")
            with monkeypatch.context() as patch:
                patch.setattr(LATE, "copy", copying)
                comm.recv(out, 0)
            np.testing.assert_array_equal(out.numpy(), x)
        assert len(moved) == pieces and moved[-1] - moved[0] > (pieces - 2) * delay

    ping(comm, check)


@pair
def test_a_send_in_pieces_needs_no_wait(comm, slowly):
    """Even though the thread that started it waits for something else, which comes later."""

    def check(first):
        x, answer = np.arange(4000.0), np.zeros(1)
        if first:
            work = comm.send_async(LATE.put(x), 1)
            comm.recv(answer, 1)
            assert answer[0] == 5
            work.wait()
        else:
            np.testing.assert_array_equal(comm.recv(LATE.empty(x.shape, "float64"), 0).numpy(), x)
            comm.send(np.full(1, 5.0), 0)

    ping(comm, check)


@pair
def test_messages_of_one_tag_keep_their_order_in_any_memory(comm, slowly):
    def check(first):
        steps = range(6)
        arrays = [np.full(1 + 100 * step, float(step)) for step in steps]
        if first:
            works = [comm.send_async(LATE.put(arrays[step]) if step % 2 else arrays[step], 1) for step in steps]
            for work in works:
                work.wait()
            return
        outs = [LATE.empty(arrays[s].shape, "float64") if s % 3 else np.zeros(arrays[s].shape) for s in steps]
        for work in [comm.recv_async(out, 0) for out in outs]:
            work.wait()
        for array, out in zip(arrays, outs, strict=True):
            np.testing.assert_array_equal(out if isinstance(out, np.ndarray) else out.numpy(), array)

    ping(comm, check)


@pair
def test_messages_follow_the_order_of_the_callers_stream(comm, slowly):
    """Earlier work fills the sent array and reads the receiving one; later work sees the message."""

    def check(first):
        with LATE.using(LATE.stream()):
            x = LATE.put(np.full(300, 1.0 if first else -1.0))
            if first:
                LATE.kernels.scale(LATE.wrap(x, "x"), 3)
                comm.send(x, 1)
                LATE.kernels.fill(LATE.wrap(x, "x"), 0)
                return
            before = LATE.wrap(x, "x").copy().owner
            comm.recv(x, 0)
            after = LATE.wrap(x, "x").copy().owner
            np.testing.assert_array_equal(before.numpy(), np.full(300, -1.0))
            np.testing.assert_array_equal(after.numpy(), np.full(300, 3.0))

    ping(comm, check)


@pair
def test_a_wait_in_another_thread_orders_that_threads_stream(comm, slowly):
    def check(first):
        if first:
            comm.send(LATE.put(np.arange(300.0)), 1)
            return
        work, seen = comm.recv_async(LATE.empty((300,), "float64"), 0), []

        def other():
            with LATE.using(LATE.stream()):
                seen.append(LATE.wrap(work.wait(), "x").copy().owner.numpy())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        np.testing.assert_array_equal(seen[0], np.arange(300.0))

    ping(comm, check)


@pair
def test_unreferenced_arrays_live_until_they_are_transferred(comm):
    def check(first):
        if first:
            work = comm.send_async(LATE.put(np.arange(200_000.0)), 1)
            for _ in range(5):
                LATE.put(np.zeros(200_000))
            work.wait()
            return
        ignored = comm.recv_async(LATE.empty((200_000,), "float64"), 0)
        np.testing.assert_array_equal(ignored.wait().numpy(), np.arange(200_000.0))

    ping(comm, check)


@pair
def test_a_message_of_the_wrong_length_is_an_error(comm):
    def check(first):
        if first:
            for length in (100, 300, 40_000):
                comm.send(LATE.put(np.ones(length)), 1)
            return
        for length in (200, 200, 30_000):
            guarded = poisoned(np.full(length + 8, 5.0))  # nothing may be written past the end
            out = LATE.at(guarded.ctypes.data, (length,), "float64", guarded)
            with pytest.raises(MismatchError, match=rf"expected {8 * length} bytes"):
                comm.recv(out, 0)
            assert (guarded[length:] == 5).all()

    ping(comm, check)


@pair
def test_a_late_receive_can_be_waited_for_again(comm):
    def check(first):
        if first:
            comm.recv(np.zeros(1), 1, 5)
            comm.send(LATE.put(np.arange(300.0)), 1)
            return
        work = comm.recv_async(LATE.empty((300,), "float64"), 0)
        with pytest.raises(StallError):
            work.wait(0.02)
        comm.send(np.ones(1), 0, 5)
        np.testing.assert_array_equal(work.wait().numpy(), np.arange(300.0))

    ping(comm, check)


def test_an_array_is_not_received_into_itself(comm):
    x = LATE.put(np.arange(300.0))
    with pytest.raises(UsageError, match="x and out overlap"):
        comm.send_recv(x[:200], comm.rank, x[100:], comm.rank)


@pair
@pytest.mark.parametrize("what", ["sent", "received"])
def test_a_missing_wait_is_detected(comm, monkeypatch, what):
    """An array sent too early arrives as poison; a received one is overwritten by earlier queued work."""
    if not is_direct(comm, 1 - min(comm.rank, 1)):
        pytest.skip("nothing goes by messages of the device's memory")

    def check(first):
        expected = np.arange(300.0)
        x, go = LATE.put(expected), np.zeros(1)
        if what == "received":
            LATE.synchronise()
        if first:
            comm.recv(go, 1, 5)
            comm.send(x, 1)
            return
        out = LATE.empty((300,), "float64")
        if what == "received":
            LATE.copy(LATE.wrap(out, "out"), LATE.wrap(LATE.put(np.zeros(300)), "zeros"))
        work = comm.recv_async(out, 0)
        comm.send(go, 0, 5)
        assert not np.array_equal(work.wait().numpy(), expected)

    monkeypatch.setattr(LATE, "delay", 0.2)
    monkeypatch.setattr("commlib.p2p.lanes.staging.wait_for", lambda event, on_wait: None)
    ping(comm, check)


@pair
def test_a_stuck_device_is_named(comm, monkeypatch):
    class Never:
        def done(self):
            return False

    def check(first):
        x = LATE.put(np.zeros(8))
        LATE.synchronise()
        with monkeypatch.context() as patch:
            patch.setattr(comm.runtime, "config", Config(timeout=0.2, node_path=comm.config.node_path))
            patch.setattr(type(LATE.current()), "record", lambda self: Never())
            with pytest.raises(StallError, match=r"send: .* late"):
                comm.send(x, 1 if first else 0)

    ping(comm, check)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = comm.send_recv(LATE.put(np.full(8, comm.rank)), right, LATE.empty((8,), "int64"), left)
    assert (out.numpy() == left).all()


@pair
@pytest.mark.parametrize("codec", [None, "bf16"])
def test_channels_send_device_arrays_and_receive_on_the_host(comm, slowly, codec):
    """Also while the other side has no room; earlier queued work is in them, and later work is not."""

    def check(first):
        with (
            LATE.using(LATE.stream()),
            comm.channel(1 if first else 0, f"late {codec}", (300,), codec=codec) as channel,
        ):
            for step in range(4):
                x = LATE.put(np.full(300, step + comm.rank, np.float32))
                LATE.kernels.scale(LATE.wrap(x, "x"), 2)
                channel.send_async(x).wait() if step == 2 else channel.send(x)
                LATE.kernels.fill(LATE.wrap(x, "x"), 0)
                view = channel.recv()
                np.testing.assert_array_equal(view, np.full(300, 2 * (step + 1 - comm.rank)))
                channel.release(view)
            works = [channel.send_async(LATE.put(np.full((2, step), step, np.float32))) for step in range(5)]
            for step in range(5):
                view = channel.recv()
                np.testing.assert_array_equal(view, np.full((2, step), step))
                channel.release(view)
            for work in works:
                work.wait()
            with pytest.raises(UsageError, match="x is float64, but the channel was opened for float32"):
                channel.send(LATE.put(np.zeros(3)))
            comm.send_recv(np.zeros(1), channel.peer, np.zeros(1), channel.peer, 9)  # both have received

    ping(comm, check)
