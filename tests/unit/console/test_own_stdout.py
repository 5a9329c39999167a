"""Output for programs has only our own lines: a library's warning once broke `commlib info --json`."""

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


def test_standard_output_has_only_our_own_lines():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, encoding="utf-8")
    assert done.stdout == "before\nfür Programme\n"
    assert done.stderr == "noise\nnoise at the end\n"


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_a_stream_without_a_file_is_not_changed(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    reserve_stdout()
    assert sys.stdout is stream
