"""Nothing hangs: MPI in a process of its own, and a time limit for what runs in this one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from commlib.diagnosis.facts import MpiFacts
from commlib.diagnosis.mpi import try_alone

SAY = """
import json, sys, time
print("noise")
def say(**told):
    print("commlib.diagnosis: " + json.dumps(told), flush=True)
"""


def tried(program: str, seconds: float = 20.0):
    return try_alone(seconds, {"PATH": "/bin"}, (sys.executable, "-c", SAY + program))


def test_what_it_tells():
    mpi = {"library": "X", "file": "/x", "vendor": "", "abi": "mpich", "seconds": 0.5}
    found = tried(f"say(mpi={mpi}, peer_reads=True, failure='')")
    assert found.mpi == MpiFacts("X", "/x", "", "mpich", seconds=0.5) and found.peer_reads is True and not found.failure


@pytest.mark.parametrize(
    "program, failure",
    [
        ("sys.exit('no such device')", "the process that started MPI ended with exit code 1: no such device"),
        ("import os; os.kill(os.getpid(), 11)", "ended with SIGSEGV: it printed nothing"),
        ("say(mpi=None, peer_reads=None, failure='it runs at SINGLE')", "it runs at SINGLE"),
    ],
)
def test_what_goes_wrong(program, failure):
    found = tried(program)
    assert found.mpi is None and found.failure.endswith(failure)


def test_no_process_can_be_started():
    assert try_alone(5.0, {}, ("/no/such/program",)).failure.startswith("no process to start MPI in: ")


def test_it_hangs():
    began = time.monotonic()
    assert tried("time.sleep(60)", 1.0).failure == "MPI did not start within 1 s"
    assert time.monotonic() - began < 20


WATCHED = """
import sys, time
from commlib.diagnosis.watch import Watch
with Watch({text!r}) as watch:
    watch.step("think", 20)
    watch.step("sleep in MPI", {limit})
    time.sleep({sleeps})
print("after")
"""


def watched(**values):
    program = WATCHED.format(**values)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_step_that_takes_too_long_ends_the_process_with_what_is_known():
    done = watched(text="what is known", limit=0.5, sleeps=60)
    assert done.returncode == -9 and not done.stdout
    assert "what is known" in done.stderr and "this process did not sleep in MPI within 0.5 s" in done.stderr


def test_who_is_not_the_first_ends_without_a_word():
    done = watched(text="", limit=0.5, sleeps=60)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")


def test_a_process_that_dies_has_a_last_word():
    """MPICH dies of a bus error where /dev/shm is full."""
    done = watched(text="what is known", limit=20, sleeps="0); import os; os.kill(os.getpid(), 7")
    assert done.returncode == -7
    assert 'what is known\n- error: this process ended during the step "sleep in MPI"' in done.stderr


def test_in_time():
    done = watched(text="what is known", limit=20, sleeps=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "after\n", "")
