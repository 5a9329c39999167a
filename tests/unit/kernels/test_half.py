"""float16 conversions by instructions and by integers both match numpy to the last bit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import numba as nb, numpy as np
from numba.core.registry import cpu_target
from commlib.kernels.host import half, intrinsics as ins

@nb.njit
def widen(halves, floats):
    for i in range(halves.size):
        floats[i] = ins.half_to_float(halves[i])

@nb.njit
def narrow(floats, halves):
    for i in range(halves.size):
        halves[i] = ins.float_to_half(floats[i])

halves = np.arange(1 << 16, dtype=np.uint16)
floats = np.empty(halves.size, np.float32)
widen(halves, floats)
expected = halves.view(np.float16).astype(np.float32)
number = ~np.isnan(expected)
assert (floats[number].view(np.uint32) == expected[number].view(np.uint32)).all() and np.isnan(floats[~number]).all()

# around the midpoints of two float16, of all sizes and both signs; infinities, NaN; anything
steps = np.arange(0x32000000 >> 12, 0x48000000 >> 12, dtype=np.uint32) << 12
anything = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
special = np.array([0, 1, 0x7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32)
bits = np.concatenate([steps, steps + 1, steps - 1, anything, special])
floats = np.concatenate([bits, bits ^ np.uint32(1 << 31)]).view(np.float32)
halves = np.empty(floats.size, np.uint16)
narrow(floats, halves)
with np.errstate(all="ignore"):
    expected = floats.astype(np.float16)
number = ~np.isnan(floats)
assert (halves[number] == expected[number].view(np.uint16)).all() and np.isnan(halves[~number].view(np.float16)).all()
print("by instructions:", half.has_instructions(cpu_target.target_context))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have the instructions")
@pytest.mark.parametrize(("cpu", "how"), [("x86-64-v2", "False"), ("x86-64-v3", "True")])
def test_conversions_match_numpy(cpu: str, how: str) -> None:
    """Without the instructions LLVM ended the process: it looked for a function that was not loaded."""
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == f"by instructions: {how}\n", done.stderr
