"""tests/plugins/moving.py: dots come in lines that end, however slow the tests are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
from tests.plugins import moving
moving.SECONDS = {seconds}
@pytest.mark.parametrize("number", range(5))
def test_it(number): pass
"""


def dots(folder, seconds):
    file = folder / "test_five.py"
    file.write_text(TESTS.format(seconds=seconds))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--color=no",
        "-p",
        "tests.plugins.moving",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", str(folder), str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert "5 passed" in done.stdout, done.stdout + done.stderr
    return [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith(".")]


def test_a_line_ends_after_some_time(tmp_path):
    """A launcher that passes on whole lines stayed silent for minutes while the tests ran."""
    assert dots(tmp_path, 0) == ["."] * 5


def test_lines_that_fill_quickly_stay_whole(tmp_path):
    assert dots(tmp_path, 1000) == ["....."]
