"""tests/again.py: what a further run would only say again is left out, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.any_ranks
def test_any_ranks(): pass

@pytest.mark.any_mpi
def test_any_mpi(): pass

@pytest.mark.parametrize("which", [pytest.param(0, marks=[pytest.mark.any_ranks, pytest.mark.any_mpi]), 1])
def test_each(which): pass
"""
EVERYTHING = {"any_ranks", "any_mpi", "each[0]", "each[1]"}


@pytest.mark.parametrize(
    "again, left_out",
    [
        ("", set()),
        ("ranks", {"any_ranks", "each[0]"}),
        ("mpi", {"any_mpi", "each[0]"}),
        ("ranks,mpi", EVERYTHING - {"each[1]"}),
    ],
)
def test_what_is_marked_is_left_out(tmp_path, again, left_out):
    done = collect(tmp_path, f"--again={again}")
    found = {line.split("::test_")[1] for line in done.stdout.splitlines() if "::" in line}
    assert found == EVERYTHING - left_out, done.stdout
    assert not left_out or f"({len(left_out)} deselected)" in done.stdout


def test_unknown_words_are_refused(tmp_path):
    done = collect(tmp_path, "--again=rank")
    assert done.returncode == 4 and "--again: expected some of ranks, mpi, got rank" in done.stderr


def collect(folder, option):
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  any_ranks\n  any_mpi\n")
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--co", "-p", "no:cacheprovider", "-p", "tests.again", option]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
