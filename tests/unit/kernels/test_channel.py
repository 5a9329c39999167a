"""The kernels of a channel on a node: an inbox, and two ends of it in one process."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from commlib.kernels.fields import arrays
from commlib.kernels.fields import channel as kernels
from commlib.kernels.machine_code import entry_point

put, take, back = entry_point("channel.put", 2), entry_point("channel.take"), entry_point("channel.release", 2)


class Pair:
    """Both ends of an inbox of `depth` slots for arrays of float32."""

    def __init__(self, shape, depth=2, streamed=1 << 40):
        self.shape = np.array(shape or (0,), np.int64)
        self.nbytes = 4 * int(np.prod(shape))
        stride = (self.nbytes // 64 + 1) * 64
        self.memory = np.zeros((depth * (kernels.HEAD_BYTES + stride)) // 8 + 16, np.int64)
        base = (self.memory.ctypes.data + 127) // 128 * 128
        self.sender, self.receiver = (np.zeros(kernels.END_FIELDS, np.int64) for _ in range(2))
        for end in (self.sender, self.receiver):
            end[kernels.HEADS], end[kernels.DEPTH] = base, depth
            end[kernels.DATA], end[kernels.STRIDE] = base + depth * kernels.HEAD_BYTES, stride
            end[kernels.NBYTES], end[kernels.STREAMED] = self.nbytes, streamed
            end[kernels.SPINS], end[kernels.YIELDS], end[kernels.NAPS], end[kernels.NAP_MICROSECONDS] = 5, 5, 2, 10
        self.sender[kernels.DESCR], self.sender[kernels.NDIM] = id(np.dtype(np.float32)), len(shape)
        self.sender[kernels.SHAPE] = self.shape.ctypes.data

    def put(self, x):
        return put(self.sender.ctypes.data, id(x))

    def take(self):
        return take(self.receiver.ctypes.data)

    def at(self, slot):
        offset = int(self.receiver[kernels.DATA]) + slot * int(self.receiver[kernels.STRIDE]) - self.memory.ctypes.data
        return self.memory.view(np.uint8)[offset : offset + self.nbytes].view(np.float32)


def test_the_kernels_layout_of_arrays_is_numpys():
    assert arrays.are_where_expected()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (1,), (40, 50), (0,)])
@pytest.mark.parametrize("streamed", [1, 1 << 40])
def test_messages_rotate_through_the_slots(depth, shape, streamed):
    pair = Pair(shape, depth, streamed)
    for step in range(3 * depth + 1):
        x = np.full(shape, step, np.float32)
        assert pair.put(x) == kernels.DONE
        slot = pair.take()
        assert slot == step % depth and (pair.at(slot) == step).all()
        assert back(pair.receiver.ctypes.data, 0) == kernels.DONE


def test_full_empty_and_held_inboxes_return_their_codes():
    pair, x = Pair((3,)), np.ones(3, np.float32)
    assert pair.take() == kernels.WAITING
    assert [pair.put(x) for _ in range(3)] == [kernels.DONE, kernels.DONE, kernels.WAITING]
    assert [pair.take() for _ in range(3)] == [0, 1, kernels.HELD]
    view = pair.at(1)
    assert back(pair.receiver.ctypes.data, id(view)) == kernels.DONE
    assert pair.put(x) == kernels.WAITING  # the next slot is the other one
    assert back(pair.receiver.ctypes.data, id(pair.at(0)[1:2])) == kernels.DONE
    assert [pair.put(x) for _ in range(3)] == [kernels.DONE, kernels.DONE, kernels.WAITING]
    assert back(pair.receiver.ctypes.data, id(np.zeros(3, np.float32))) == kernels.OTHER
    assert pair.sender[kernels.COUNT] == 4 and pair.receiver[kernels.COUNT] == 2


def test_releasing_a_slot_twice_skips_no_message():
    pair, x = Pair((3,), depth=1), np.ones(3, np.float32)
    assert pair.put(x) == kernels.DONE and pair.take() == 0
    view = pair.at(0)
    back(pair.receiver.ctypes.data, id(view))
    assert pair.put(x) == kernels.DONE
    back(pair.receiver.ctypes.data, id(view))  # the next message is there, and has not been received
    assert pair.put(x) == kernels.WAITING and pair.take() == 0


@pytest.mark.parametrize(
    "other",
    [
        np.ones(3),
        np.ones(3, np.int32),
        np.ones(4, np.float32),
        np.ones((3, 1), np.float32),
        np.ones((), np.float32),
        np.ones(6, np.float32)[::2],
        np.ones(3, ">f4"),
    ],
    ids=["float64", "int32", "longer", "2-D", "0-D", "gaps", "other byte order"],
)
def test_a_mismatched_array_is_not_sent(other):
    pair = Pair((3,))
    assert pair.put(other) == kernels.OTHER
    assert pair.take() == kernels.WAITING and pair.sender[kernels.BUSY] == 0


def test_halted_and_busy_ends_send_nothing():
    pair, x = Pair((3,)), np.ones(3, np.float32)
    pair.sender[kernels.HALTED] = pair.receiver[kernels.HALTED] = 1
    assert pair.put(x) == pair.take() == kernels.STOPPED
    pair.sender[kernels.HALTED] = pair.receiver[kernels.HALTED] = 0
    pair.sender[kernels.BUSY] = 1  # set by a thread that has reserved a slot
    assert pair.put(x) == kernels.WAITING
    pair.sender[kernels.BUSY] = 0
    assert pair.put(x) == kernels.DONE


def test_a_change_is_reported_before_the_message_is_received():
    pair, x = Pair((3,)), np.ones(3, np.float32)
    pair.put(x)
    pair.sender[kernels.SPEC] = 1
    pair.put(x)
    assert pair.take() == 0
    assert pair.take() == pair.take() == kernels.OTHER
    pair.receiver[kernels.SPEC] = 1
    assert pair.take() == 1


def test_concurrent_senders_lose_no_message():
    pair, errors = Pair((100,), depth=3), []

    def send(value):
        x = np.full(100, value, np.float32)
        for _ in range(500):
            while (status := pair.put(x)) != kernels.DONE:
                if status != kernels.WAITING:
                    errors.append(status)
                    return

    threads = [threading.Thread(target=send, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    seen = {1: 0, 2: 0}
    for _ in range(1000):
        while (slot := pair.take()) < 0:
            assert slot == kernels.WAITING
        data = pair.at(slot)
        assert (data == data[0]).all()
        seen[int(data[0])] += 1
        back(pair.receiver.ctypes.data, 0)
    for thread in threads:
        thread.join()
    assert seen == {1: 500, 2: 500} and not errors
