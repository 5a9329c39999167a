"""Importing kernels: no side effects in a process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import numpy as np
import commlib.kernels.host.compilation
from numba.core import errors
from numba.cpython import listobj  # which makes an error message, as soon as anything is compiled
print("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING" in os.environ)
"""

COLORAMA = """
import atexit
__version__ = "9.9.9"
class Fore: RED = GREEN = BLACK = CYAN = YELLOW = BLUE = MAGENTA = WHITE = LIGHTBLUE_EX = LIGHTBLACK_EX = ""
class Style: BRIGHT = NORMAL = DIM = RESET_ALL = ""
def init(): atexit.register(print, "escape codes")
def reinit(): pass
def deinit(): pass
"""


def test_importing_adds_nothing_to_the_output(tmp_path):
    """With colorama installed numba wrote escape codes at the end, and every rank has a terminal under Open MPI."""
    (tmp_path / "colorama.py").write_text(COLORAMA)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
