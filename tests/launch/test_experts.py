"""Jobs with mixtures of experts: files for both frameworks, the timeline, a rank that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.long
def test_files_work_in_both_frameworks(mpirun, tmp_path):
    """A model trained by PyTorch on two ranks is trained further in Keras on one, and from there in both on two."""
    pytest.importorskip("tensorflow")
    program = Path(__file__).with_name("experts_of_both.py")
    done = mpirun(2, [str(program), str(tmp_path)], env=QUIET, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 2


TIMELINE = """
import commlib, torch
from commlib.expert import Experts
from commlib_torch import MoE
comm = commlib.init()
with commlib.timeline("timeline.json"):
    layer = MoE(4, Experts(2 * comm.size, top_k=1, hidden=3, force_balanced=True), comm, name="one")
    layer(torch.ones(8, 4))
"""


@pytest.mark.long
def test_the_timeline_shows_the_load(mpirun, tmp_path):
    done = mpirun(2, TIMELINE)
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads((tmp_path / "timeline.json").read_text())
    (counted,) = [event for event in events if event.get("ph") == "C"]
    assert counted["name"] == "load of one"
    assert counted["args"] == {"0": 2, "1": 2, "2": 2, "3": 2}


# One rank's expert fails; the others wait for its rows, in the forward or in the backward.
FAILS = """
import sys, commlib, torch
from torch import nn
from commlib.expert import Experts
from commlib_torch import MoE
comm = commlib.init()
class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        y = self.linear(x)
        if comm.rank == comm.size - 1:
            if WHEN == "forward":
                raise ValueError("out of luck")
            def fail(gradient):
                raise ValueError("out of luck")
            y.register_hook(fail)
        return y
layer = MoE(4, Experts(4, top_k=2), comm, expert=Fails)
layer(torch.randn(5, 4)).sum().backward()
"""


@pytest.mark.parametrize("when", ["forward", pytest.param("backward", marks=pytest.mark.long)])
def test_a_failing_expert_ends_the_job(mpirun, when):
    done = mpirun(3, f"WHEN = {when!r}\n{FAILS.replace('4, top_k', '6, top_k')}")
    assert done.returncode != 0
    assert "ValueError: out of luck" in done.stderr
