"""Signal handlers that raise while a kernel is compiled or loaded: the next call succeeds, and numba still works."""

from __future__ import annotations

import os
import subprocess
import sys

import numba as nb
import numpy as np

from commlib.kernels.host.stream import stream_copy

# One after the other, so that alarms come at many moments of compiling and of loading.
PROGRAM = """
import itertools
import signal
import numpy as np
from commlib.execution.reduce_function import ReduceFunction

def ring(*_):
    raise InterruptedError("alarm")

def insist(call):
    interrupted = 0
    for number in itertools.count(1):
        try:
            signal.setitimer(signal.ITIMER_REAL, 2e-4 * number)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return interrupted
        except InterruptedError:
            interrupted += 1

signal.signal(signal.SIGALRM, ring)
x = np.ones(100)
interrupted = insist(lambda: ReduceFunction("float64", "sum").combine([x, x.copy()], x))
assert (x == 2).all(), x
print(interrupted)
"""


def test_the_next_call_uses_the_interrupted_kernel(tmp_path):
    """Numba raised TypingError from then on; and a kernel that was being loaded was discarded and compiled again."""
    (folder := tmp_path / "cache").mkdir(mode=0o700)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "NUMBA_CACHE_DIR": ""}
    codes_ = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 0, "no alarm came before it was done"
        assert "anew" not in done.stderr, done.stderr
        codes_.append({path: path.stat().st_mtime_ns for path in folder.rglob("reduce.reduction-*")})
    assert codes_[0] and codes_[0] == codes_[1]


def test_a_users_function_can_call_a_kernel():
    """Its compilation holds numba's lock, for which a thread that compiles the kernel would wait."""

    @nb.njit
    def copy(target, source, size):
        stream_copy(target, source, size)

    x, y = np.arange(100.0), np.zeros(100)
    copy(y.ctypes.data, x.ctypes.data, np.uint16(x.nbytes))  # uint16, a type without an earlier compilation
    assert (y == x).all()
