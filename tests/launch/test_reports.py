"""The error that ends a job: one rank shows it once, whole, after all other output."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.any_mpi

HEAD = """
import os, sys, time
import numpy as np
import commlib
comm = commlib.init()
x = np.ones(5)
comm.barrier()

def train():
    {}

train()
"""

USAGE = "comm.all_reduce(x, op='men')"
MESSAGE = "UsageError: unknown operation 'men'; known are sum, mean, min, max, prod; did you mean 'mean'?"


def report(err):
    """Return the ranks' final report, without what comes before it and what the launcher adds."""
    return err[err.rindex("commlib: rank ") :]


def test_an_error_on_all_ranks_is_shown_once_without_inner_frames(mpirun):
    """Each rank printed it, mixed line by line with the others, with all frames."""
    done = mpirun(3, HEAD.format(USAGE))
    assert done.returncode != 0
    assert done.stderr.count(MESSAGE) == 1 == done.stderr.count("Traceback"), done.stderr
    lines = report(done.stderr).splitlines()
    assert re.fullmatch(
        r"commlib: rank \d of 3 on \S+ ended by an uncaught UsageError in all_reduce; aborting the job", lines[0]
    )
    assert re.search(r"program_0.py\", line \d+, in train$", lines[4]) and USAGE in lines[5]
    assert re.fullmatch(r"  \(\d frames inside commlib; COMMLIB_TRACEBACK=full shows them\)", lines[6])
    assert lines[7] == f"commlib.errors.{MESSAGE}"
    assert re.fullmatch(r"\(the same error on ranks \d(-|, )\d\)", lines[8])
    assert "communicator.py" not in done.stderr


def test_every_rank_shows_all_frames_on_request(mpirun):
    done = mpirun(2, HEAD.format(USAGE), env={"COMMLIB_TRACEBACK": "full"})
    assert done.stderr.count("commlib: rank ") == 2, done.stderr
    assert "communicator.py" in done.stderr and "frames inside" not in done.stderr


def test_a_mismatch_is_shown_once_with_its_whole_message(mpirun):
    done = mpirun(2, HEAD.format("comm.all_reduce(np.ones(4 + comm.rank))"))
    assert done.stderr.count("the ranks do not make the same call") == 1, done.stderr
    assert "rank 0: all_reduce of 4 x float64" in done.stderr and "rank 1: all_reduce of 5 x float64" in done.stderr
    assert "(the same error on rank " in report(done.stderr)


def test_only_the_original_error_is_shown(mpirun, tmp_path):
    """Rank 0 is notified of the failure before rank 1 shows it."""
    body = """
    if comm.rank == 1:
        try:
            comm.group.leave("raised ValueError")
            time.sleep(0.7)
        finally:
            raise ValueError("first line\\nout of luck")
    comm.recv(x, 1)"""
    done = mpirun(2, HEAD.format(body))
    lines = report(done.stderr).splitlines()
    assert lines[0].startswith("commlib: rank 1 of 2 on ") and "ValueError" in lines[0], done.stderr
    assert "ValueError: first line\nout of luck\n" in report(done.stderr)
    assert "PeerError:" not in done.stderr
    saved = list(tmp_path.glob("commlib-hangs/job-*/error-0.txt"))
    assert not saved or "PeerError: " in saved[0].read_text()


def test_different_errors_are_saved_in_files(mpirun, tmp_path):
    done = mpirun(2, HEAD.format("raise ValueError(f'{chr(97 + comm.rank)} is wrong')"))
    assert done.stderr.count("ValueError: ") == 1, done.stderr
    (saved,) = tmp_path.glob("commlib-hangs/job-*/error-?.txt")
    assert re.search(r"\(other errors on rank \d, in .*/commlib-hangs/job-\w+/error-RANK.txt\)", done.stderr)
    messages = re.findall(r"ValueError: (\w is wrong)", done.stderr + saved.read_text())
    assert sorted(messages) == ["a is wrong", "b is wrong"]


def test_the_programs_exception_hook_is_still_called_on_every_rank(mpirun):
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: sys.stderr.write(f'mine: {error}\\n')\n"
    done = mpirun(2, hook + HEAD.format(USAGE))
    assert done.returncode != 0
    assert done.stderr.count("mine: unknown operation") == 2, done.stderr
    assert done.stderr.count("commlib: rank ") == 1 and "Traceback" not in done.stderr
    assert re.search(r"UsageError in all_reduce: unknown operation 'men'; .*; aborting the job", done.stderr)


def test_a_misspelled_verb_gets_the_nearest_name(mpirun):
    done = mpirun(2, HEAD.format("comm.allreduce(x)"))
    assert done.stderr.count("has no attribute 'allreduce'. Did you mean: 'all_reduce'?") == 1, done.stderr


FRAMEWORKS = {
    "torch": ("import torch, commlib_torch as ct", "ct.all_reduce(torch.ones(3), op='men')"),
    "tensorflow": ("import tensorflow as tf, commlib_tensorflow as ct", "ct.all_reduce(tf.ones(3), op='men')"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frames_of_the_adapters_are_folded_too(mpirun, framework):
    pytest.importorskip(framework)
    imports, call = FRAMEWORKS[framework]
    done = mpirun(2, HEAD.format(f"{imports}; {call}"), timeout=120)
    assert done.stderr.count("unknown operation 'men'") == 1, done.stderr
    assert call in report(done.stderr) and "inside commlib" in report(done.stderr)
    assert f"commlib_{framework}/" not in report(done.stderr)
