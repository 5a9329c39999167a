"""The late device of the tests: missing waits are detected, and correct waits give correct data."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from commlib.buffers.views import as_host
from commlib.devices.arrays import as_contiguous, device_of, empty_like, overlap
from commlib.devices.host import HOST
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from tests.late import LATE, LateArray, LateDevice, engine


@pytest.fixture
def slow():
    return LateDevice(delay=0.2)  # long enough for this thread to look on a busy machine


def test_new_memory_is_poison(slow):
    assert np.isnan(slow.empty((3,), "float32").peek()).all()
    assert np.isnan(slow.empty((3,), "bfloat16").peek().astype(np.float32)).all()
    assert (slow.empty((3,), "int8").peek().view(np.uint8) == 0xA5).all()


def test_an_unfinished_copy_is_poison(slow):
    array = slow.put(np.arange(4.0))
    assert np.isnan(array.peek()).all()
    np.testing.assert_array_equal(array.numpy(), np.arange(4.0))


def test_an_overwritten_array_is_poison_until_it_is_written(slow):
    array, other = slow.put(np.zeros(4)), slow.put(np.arange(4.0))
    slow.synchronise()
    slow.copy(slow.wrap(array, "x"), slow.wrap(other, "x"))
    assert np.isnan(array.peek()).all()
    np.testing.assert_array_equal(array.numpy(), np.arange(4.0))


def test_earlier_work_reads_the_old_values(slow):
    array, new = slow.put(np.arange(4.0)), slow.put(np.full(4, 7.0))
    pending = slow.wrap(array, "x").copy()
    slow.copy(slow.wrap(array, "x"), slow.wrap(new, "x"))
    np.testing.assert_array_equal(pending.owner.numpy(), np.arange(4.0))
    np.testing.assert_array_equal(array.numpy(), np.full(4, 7.0))


def test_another_stream_without_a_wait_reads_poison(slow):
    array = slow.put(np.arange(4.0))
    with slow.using(slow.stream()):
        copied = slow.wrap(array, "x").copy().owner
        assert np.isnan(copied.numpy()).all()


def test_another_stream_with_a_wait_reads_values(slow):
    array = slow.put(np.arange(4.0))
    ready = slow.current().record()
    with slow.using(slow.stream()):
        slow.current().wait(ready)
        np.testing.assert_array_equal(slow.wrap(array, "x").copy().owner.numpy(), np.arange(4.0))


def test_host_memory_overwritten_before_the_read_does_not_arrive(slow):
    staging, array = slow.staging(4), slow.empty((4,), "uint8")
    staging[:] = 1
    slow.copy(slow.wrap(array, "x"), staging)
    staging[:] = 2
    assert (array.numpy() != 1).all()


def test_data_that_changes_during_a_read_arrives_as_poison(slow, monkeypatch):
    array, other = slow.put(np.zeros(4)), slow.put(np.ones(4))
    slow.synchronise()
    reading, written = threading.Event(), threading.Event()

    def work_of_either(_):  # the reader is at it until the writer is done
        if not reading.is_set():
            reading.set()
            written.wait(20)

    monkeypatch.setattr(engine, "time", SimpleNamespace(sleep=work_of_either))
    copied = slow.wrap(array, "x").copy().owner
    assert reading.wait(20)
    with slow.using(slow.stream()):
        slow.copy(slow.wrap(array, "x"), slow.wrap(other, "x"))
        slow.synchronise()
    written.set()
    slow.synchronise()
    assert np.isnan(copied.numpy()).all() and slow.races == 1


def test_released_memory_is_poison_for_other_streams(slow):
    array = slow.put(np.arange(4.0))
    slow.synchronise()
    other, gate = slow.stream(), slow.current().record()
    bare = slow.wrap(array, "x")
    bare.owner = None
    del array
    gc.collect()
    slow.synchronise()
    with slow.using(other):
        other.wait(gate)
        assert np.isnan(bare.copy().owner.numpy()).all()


def test_a_stream_belongs_to_a_thread(slow):
    mine, streams = slow.stream(), []
    with slow.using(mine):
        thread = threading.Thread(target=lambda: streams.append(slow.current()))
        thread.start()
        thread.join()
        assert slow.current() is mine and streams[0] is not mine


def test_waiting_polls_and_can_be_stopped(slow):
    array = slow.put(np.arange(4.0))
    polls = []
    wait_for(slow.current().record(), lambda: polls.append(1))
    assert polls and array.peek()[3] == 3
    array = slow.put(np.arange(4.0))


def test_waiting_ends_when_its_hook_raises(slow):
    def give_up():
        raise KeyError("given up")

    slow.put(np.arange(4.0))
    with pytest.raises(KeyError):
        wait_for(slow.current().record(), give_up)


def test_kernels_match_the_bits_of_the_host(slow):
    xs = [np.arange(5, dtype=np.float32), np.full(5, 2.5, np.float32)]
    late = [slow.wrap(slow.put(x), "x") for x in xs]
    target = late[0].empty((5,), "float32")
    slow.kernels.reduce("float32", "sum", 0, late, target)
    slow.kernels.scale(target, 2)
    np.testing.assert_array_equal(target.owner.numpy(), 2 * (xs[0] + xs[1]))
    assert slow.kernels.squares(late[0]) == 30


def test_a_late_array_is_not_a_host_array():
    array = LATE.put(np.arange(3))
    assert device_of(array) is LATE and device_of(np.arange(3)) is HOST and device_of(b"abc") is HOST
    with pytest.raises(UsageError, match="expected an array"):
        as_host(array, "verb")
    assert isinstance(array, LateArray) and not hasattr(array, "__array__")


def test_device_arrays_can_be_sliced_and_reshaped():
    array = as_contiguous(LATE.put(np.arange(12, dtype=np.int16).reshape(4, 3)), "verb")
    part = array[1:3]
    assert (part.shape, part.nbytes, part.itemsize, len(part)) == ((2, 3), 12, 2, 2)
    assert part.reshape(-1).shape == (6,) and part.view(np.uint8).shape == (12,) and array[3:1].size == 0
    assert overlap(array, part) and not overlap(array[:1], part) and not overlap(part, np.zeros(3))
    assert empty_like(part, 5).shape == (5,) and empty_like(np.zeros(3), (2, 2), np.int8).dtype == np.int8
    with pytest.raises(IndexError):
        array[::2]
    with pytest.raises(ValueError):
        array.reshape(5)


def test_shared_memory_stays_until_queued_work_is_done(slow):
    segment = slow.share(4096, 0, lambda value: [value])
    slow.synchronise()
    with slow.using(slow.stream()):
        array = slow.at(segment.bases[0], (4,), np.float64, segment)
        slow.copy(slow.wrap(array, "x"), np.ones(4))
        event = slow.current().record()
    mapping = weakref.ref(segment.mappings[0])
    del array, segment
    gc.collect()
    assert mapping() is not None
    event.block()
    assert mapping() is None
