"""Output for programs has lines of this program alone: a library's warning made `commlib info --json` no JSON."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from commlib.console.reserved_stdout import reserve_stdout

PROGRAM = """
import atexit, os
from commlib.console.reserved_stdout import reserve_stdout
print("before")
reserve_stdout()
atexit.register(os.write, 1, b"noise at the end\\n")
os.write(1, b"noise\\n")
print("für Programme")
"""


def test_only_own_lines_come_to_standard_output():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, encoding="utf-8")
    assert done.stdout == "before\nfür Programme\n"
    assert done.stderr == "noise\nnoise at the end\n"


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_a_stream_that_is_no_file_stays_what_it_is(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    reserve_stdout()
    assert sys.stdout is stream
