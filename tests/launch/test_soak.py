"""The soak: it detects wrong results, hangs and leaks, each provoked here."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.any_mpi

HEAD = """
import sys, time
import numpy as np
from commlib.communicator import Communicator
from tests.soak import __main__ as soak
from tests.soak import script

script.WEIGHTS = {"all_gather": 1, "barrier": 1, "broadcast": 1}
soak.compile_everything = lambda comm: None  # nothing is reduced

def replace(verb):
    def decorate(make):
        setattr(Communicator, verb, make(getattr(Communicator, verb)))
    return decorate
"""

WRONG = """
@replace("all_gather")
def wrong(honest):
    def all_gather(self, x, **options):
        result = honest(self, x, **options)
        if self.name == "world" and self.rank == 1 and result.size:
            result[-1:] = 0 if result[-1:].any() else 1
        return result
    return all_gather
"""

HANG = """
@replace("barrier")
def late(honest):
    def barrier(self):
        if self.name == "world" and self.rank == 1:
            time.sleep(100)  # here
        return honest(self)
    return barrier
"""

LEAK = """
kept = []
@replace("broadcast")
def keeping(honest):
    def broadcast(self, x, *rest, **options):
        kept.append(np.ones(50_000))
        return honest(self, x, *rest, **options)
    return broadcast
"""


@pytest.fixture
def soak(mpirun):
    def run(defect):
        arguments = ["--operations", "600", "--threads", "1", "--seed", "7", "--patience", "4"]
        return mpirun(2, f"{HEAD}{defect}\nsys.exit(soak.main({arguments}))\n")

    return run


@pytest.mark.long
def test_without_a_defect_it_succeeds(soak):
    done = soak("")
    assert done.returncode == 0, done
    assert re.search(r"^soak: .* ok: 640 operations in \d+ s$", done.stdout, re.MULTILINE)
    counts = [int(count) for count in re.findall(r"(\d+) (?:all_gather|barrier|broadcast|allocate)\b", done.stdout)]
    assert len(counts) == 4 and sum(counts) == 640


def test_a_wrong_result_is_detected_and_located(soak):
    done = soak(WRONG)
    assert done.returncode != 0
    assert re.search(r"soak: rank 1, --seed 7: FAILED: thread 0, Step\(number=\d+, .*verb='all_gather'", done.stderr)
    assert "assert_same" in done.stderr


def test_a_hang_ends_and_prints_the_stuck_line(soak):
    done = soak(HANG)
    assert done.returncode != 0
    assert re.search(r"soak: rank \d, --seed 7: HANGS: thread 0 has not moved for 4.0 s", done.stderr)
    line = f"{HEAD}{HANG}".splitlines().index("            time.sleep(100)  # here") + 1
    assert re.search(rf'program_\d+.py", line {line} in barrier', done.stderr)


@pytest.mark.long
def test_a_leak_is_detected(soak):
    done = soak(LEAK)
    assert done.returncode != 0
    assert re.search(r"soak: rank \d, --seed 7: LEAKS: private grew from \d+ to \d+, 8 more are allowed", done.stderr)


@pytest.mark.parametrize("node_path", [pytest.param("1", marks=pytest.mark.long), "0"])
def test_the_cases_of_large_arrays_are_correct_on_small_ones(mpirun, node_path):
    """So that `python -m tests.soak.large`, which takes 9 GiB, is reliable when somebody runs it."""
    done = mpirun(3, ["-m", "tests.soak.large", "--bytes", "70000"], env={"COMMLIB_NODE_PATH": node_path}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right, in") == 14
