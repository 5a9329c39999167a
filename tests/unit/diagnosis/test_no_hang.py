"""Nothing hangs: MPI runs in a process of its own, and code in this process has a time limit."""

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


def run_probe(program: str, seconds: float = 20.0):
    return try_alone(seconds, {"PATH": "/bin"}, (sys.executable, "-c", SAY + program))


def test_the_probe_reports_its_facts():
    mpi = {"library": "X", "file": "/x", "vendor": "", "abi": "mpich", "seconds": 0.5}
    report = run_probe(f"say(mpi={mpi}, peer_reads=True, failure='')")
    assert (
        report.mpi == MpiFacts("X", "/x", "", "mpich", seconds=0.5) and report.peer_reads is True and not report.failure
    )


@pytest.mark.parametrize(
    "program, failure",
    [
        ("sys.exit('no such device')", "the process that started MPI ended with exit code 1: no such device"),
        ("import os; os.kill(os.getpid(), 11)", "ended with SIGSEGV: it printed nothing"),
        ("say(mpi=None, peer_reads=None, failure='it runs at SINGLE')", "it runs at SINGLE"),
    ],
)
def test_failures_of_the_probe_are_reported(program, failure):
    report = run_probe(program)
    assert report.mpi is None and report.failure.endswith(failure)


def test_a_process_that_cannot_start_is_reported():
    assert try_alone(5.0, {}, ("/no/such/program",)).failure.startswith("no process to start MPI in: ")


def test_a_hanging_probe_is_ended():
    began = time.monotonic()
    assert run_probe("time.sleep(60)", 1.0).failure == "MPI did not start within 1 s"
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


def test_a_step_beyond_its_limit_ends_the_process_with_a_report():
    done = watched(text="what is known", limit=0.5, sleeps=60)
    assert done.returncode == -9 and not done.stdout
    assert "what is known" in done.stderr and "this process did not sleep in MPI within 0.5 s" in done.stderr


def test_other_ranks_end_silently():
    done = watched(text="", limit=0.5, sleeps=60)
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")


def test_a_dying_process_prints_its_report():
    """MPICH dies of a bus error where /dev/shm is full."""
    done = watched(text="what is known", limit=20, sleeps="0); import os; os.kill(os.getpid(), 7")
    assert done.returncode == -7
    assert 'what is known\n- error: this process ended during the step "sleep in MPI"' in done.stderr


def test_a_step_in_time_prints_nothing():
    done = watched(text="what is known", limit=20, sleeps=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "after\n", "")
