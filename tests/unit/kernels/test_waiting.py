"""Waiting next to busy processes: a wait returns to Python soon on a shared core."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from commlib.kernels.fields import node as kernels
from commlib.kernels.machine_code import entry_point


@pytest.fixture
def crowded_core():
    """This process shares one core with another that computes."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert busy.stdout is not None
    try:
        busy.stdout.readline()
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        busy.kill()
        busy.communicate()


def test_a_wait_on_a_shared_core_returns_soon(crowded_core):
    """Each yield lets the other process use up its slice, here some 1.4 ms: all 2000 of them would take 2.8 s."""
    memory = np.zeros(1024, np.int64)
    control = np.zeros(kernels.CONTROL_FIELDS, np.int64)
    control[kernels.SIZE], control[kernels.BOARD] = 2, (memory.ctypes.data + 127) // 128 * 128
    call = np.zeros(kernels.CALL_FIELDS, np.int64)
    call[kernels.CONTROL], call[kernels.YIELDS], call[kernels.NAPS] = control.ctypes.data, 2000, 2
    call[kernels.NAP_MICROSECONDS] = 50
    barrier = entry_point("node.barrier")
    began = time.monotonic()
    assert barrier(call.ctypes.data) == kernels.WAITING
    assert time.monotonic() - began < 1
