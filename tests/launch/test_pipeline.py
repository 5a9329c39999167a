"""Failures in pipelines: a failed stage ends the job and names itself, a late one is named, Ctrl-C ends a wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = pytest.mark.any_mpi

HEAD = """
import os, signal, sys, threading, time
import torch
from torch import nn
import commlib
import commlib_torch as ct
comm = commlib.init()

class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number, self.calls = nn.Linear(3, 3), number, 0

    def forward(self, x):
        self.calls += 1
        event(self.number, self.calls)
        return self.linear(x)

def run(**options):
    layers = [Layer(number) for number in range(comm.size)]
    pipe = ct.pipeline(layers, comm, microbatches=4, loss=nn.functional.mse_loss, **options)
    return pipe.step(torch.ones(8, 3), torch.ones(8, 3))
"""


def test_an_exception_in_a_stage_ends_the_job_and_names_the_stage(mpirun: Any) -> None:
    program = """
def event(layer, call):
    if layer == 1 and call == 3:
        raise LookupError("no such row")
run()
"""
    done = mpirun(3, HEAD + program, timeout=40)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "LookupError: no such row" in text and "event(layer, call)" not in text.split("Traceback")[0]
    assert "at 1F2 (forward of microbatch 2 in stage 1); action " in text
    assert re.search(r"rank 1 │ .*1F2.*\n.*↑", text)
    assert "uncaught LookupError" in text


def test_a_late_rank_is_named_with_its_action(mpirun: Any) -> None:
    program = """
import logging
logging.basicConfig()
def event(layer, call):
    if layer == 0 and call == 2:
        time.sleep(6)  # a busy machine lets the other rank come seconds later
print(f"loss {run().item() > 0}")
"""
    done = mpirun(2, HEAD + program, env={"COMMLIB_STALL_WARNING": "1"}, timeout=40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss True") == 2
    assert re.search(r"WARNING.*for 1RECV_F1 \(activations of microbatch 1 from stage 0 to stage 1\)", done.stderr)


def test_an_interrupted_step_ends_the_pipeline_and_the_job(mpirun: Any) -> None:
    """The other rank computes for ever: this one, interrupted in a wait, must still end."""
    program = """
def event(layer, call):
    if layer == 0 and call == 2:
        time.sleep(60)
if comm.rank == 1:
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    run()
except KeyboardInterrupt as error:
    print(f"interrupted after {time.monotonic() - began:.1f} s", error.__notes__, flush=True)
    raise
"""
    done = mpirun(2, HEAD + program, timeout=40)
    assert done.returncode != 0
    match = re.search(r"interrupted after ([\d.]+) s (.*)", done.stdout)
    assert match, done.stdout + done.stderr
    assert float(match[1]) < 10 and "1RECV_F1" in match[2]
