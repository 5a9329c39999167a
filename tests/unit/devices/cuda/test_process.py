"""A process without CuPy or without a GPU gets an error where it requests a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "cupy":
            raise ImportError("there is no CuPy here")
sys.meta_path.insert(0, Blocked())
import commlib
comm = commlib.init()
try:
    {call}
except commlib.UsageError as error:
    print(error)
assert comm.all_reduce(__import__("numpy").ones(3)).sum() == 3
assert "commlib.kernels.cuda.table" not in sys.modules
"""

INTERFACE = (
    'type("Odd", (), dict(__cuda_array_interface__=dict(shape=(1,), typestr="<f4", data=(64, False), version=3)))()'
)


@pytest.mark.parametrize(
    "call, words",
    [
        ('comm.empty(3, device="cuda")', "empty: it needs a device of kind 'cuda'"),
        (f"comm.all_reduce({INTERFACE})", "arrays on a GPU need CuPy (there is no CuPy here)"),
        ('comm.empty(3, device="gpu")', "'gpu' is not a registered kind of device"),
    ],
)
def test_requests_without_cupy_are_errors(call, words):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    if "gpu" not in call:
        assert 'pip install ".[cuda12]"' in done.stdout
