"""Recorded copies and kernels, queued again at low cost on the current stream."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from commlib.devices.launch_replay import LaunchReplay


def array(gpu, value, count=1000, dtype="float32"):
    x = gpu.device.empty((count,), dtype)
    gpu.fill(x, value)
    return x, gpu.device.wrap(x, "x")


def test_a_tape_queues_work_at_each_run_only(gpu):
    (a, there), (_, other), (c, target), (d, copied) = (array(gpu, value) for value in (1, 2, 0, 0))

    def run():
        gpu.device.kernels.reduce("float32", "sum", 1, [there, other], target)
        gpu.device.copy(copied, target)

    again = gpu.device.repeatable(run)
    for x in (c, d):
        np.testing.assert_array_equal(gpu.fetch(x), 0)
    for value in (1, 5, 7):
        gpu.fill(a, value)
        again()
        np.testing.assert_array_equal(gpu.fetch(c), value + 2)
        np.testing.assert_array_equal(gpu.fetch(d), value + 2)


def test_a_tape_runs_on_the_current_stream(gpu, slowly):
    _, there = array(gpu, 0)
    x, target = array(gpu, 0)
    again = gpu.device.repeatable(lambda: gpu.device.copy(target, there))
    gpu.fetch(x)
    stream = gpu.device.stream()
    with gpu.device.using(stream):
        for value in range(5):  # in the order of this stream, or it would copy data before its arrival
            gpu.device.kernels.fill(there, value)
            again()
            np.testing.assert_array_equal(gpu.fetch(x), value)


def test_a_tape_can_have_more_arrays_than_arguments(gpu):
    """Their addresses are in memory of the device, which is allocated for each run: nothing else uses it meanwhile."""
    arrays = [array(gpu, number + 1, count=33) for number in range(40)]
    x, target = array(gpu, 0, count=33)
    operands = [there for _, there in arrays]
    again = gpu.device.repeatable(lambda: gpu.device.kernels.reduce("float32", "sum", 1, operands, target))
    gc.collect()
    rubbish = [array(gpu, 7, count=200, dtype="uint8") for _ in range(50)]
    for _ in range(3):
        again()
        np.testing.assert_array_equal(gpu.fetch(x), 40 * 41 / 2)
        gpu.fill(x, 0)
    assert rubbish


def test_other_threads_can_queue_during_recording(gpu):
    (a, there), (_, other) = array(gpu, 1), array(gpu, 2)

    def run():
        thread = threading.Thread(target=gpu.fill, args=(a, 9))
        thread.start()
        thread.join()
        gpu.device.copy(there, other)

    again = gpu.device.repeatable(run)
    np.testing.assert_array_equal(gpu.fetch(a), 9)
    again()
    np.testing.assert_array_equal(gpu.fetch(a), 2)


def test_host_reads_cannot_be_recorded(gpu):
    _, there = array(gpu, 1)
    with pytest.raises(AssertionError, match="no results for the host to read"):
        gpu.device.repeatable(lambda: gpu.device.kernels.squares(there))
    x, target = array(gpu, 0)
    gpu.device.kernels.fill(target, 4)  # it is queued as usual
    np.testing.assert_array_equal(gpu.fetch(x), 4)


def test_few_tapes_are_cached(gpu):
    repeats, ran = LaunchReplay(gpu.device), list[Any]()
    for key in [*range(70), 69, 69]:
        repeats.queue(key, partial(ran.append, key))
    assert ran == list(range(70))
    repeats.queue(0, partial(ran.append, "again"))
    assert ran[-1] == "again"
