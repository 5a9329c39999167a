"""Timelines of jobs, and what `commlib trace` makes of their files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys, time
import numpy as np
import commlib
"""

LATE = (
    HEAD
    + """
comm = commlib.init()
x = np.ones(30_000, np.float32)
comm.all_reduce(x)
with commlib.timeline(sys.argv[1] if len(sys.argv) > 1 else "t{rank}.json"):
    for step in range(6):
        time.sleep(0.03 if comm.rank == 1 else 0.001)
        comm.all_reduce(x)
        work = comm.all_reduce_async(x)
        time.sleep(0.002)
        work.wait()
        commlib.mark_step()
comm.barrier()
print("fine")
"""
)


def trace(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "commlib", "trace", *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.any_mpi
def test_a_late_rank_is_named(mpirun, tmp_path):
    done = mpirun(3, LATE)
    assert done.returncode == 0 and done.stdout.count("fine") == 3, done.stderr
    files = [tmp_path / f"t{rank}.json" for rank in range(3)]
    summary = json.loads(trace("summary", "--json", *files, cwd=tmp_path))
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1, 2] and summary["notes"] == []
    assert summary["steps"]["count"] == 6 and summary["steps"]["marked_by"] == "user"
    for rank in (0, 2):
        assert summary["ranks"][rank]["lost_for"].get("1", 0) > 0.08, summary["ranks"]  # of 6 times 29 ms
    assert summary["ranks"][1]["caused_wait"] > summary["ranks"][0]["caused_wait"]
    assert summary["steps"]["path"][0] == {**summary["steps"]["path"][0], "rank": 1, "what": "computes"}
    assert any("rank 1 keeps the others waiting" in text for text in summary["advice"])
    output = trace("merge", *files, "-o", "all.json.gz", cwd=tmp_path)
    assert "of 3 ranks (one clock)" in output


@pytest.mark.any_mpi
def test_ranks_with_and_without_a_timeline_and_one_that_is_killed(mpirun, tmp_path):
    """Rank 2 writes none, and its clock is not needed; rank 1 dies by SIGKILL, and its file ends early."""
    done = mpirun(
        3,
        HEAD
        + """
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 2:
    del os.environ["COMMLIB_TIMELINE"]
comm = commlib.init()
for number in range(10):
    comm.barrier()
time.sleep(0.5)  # until that is written
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
""",
        env={"COMMLIB_TIMELINE": str(tmp_path / "t{rank}.json")},
    )
    assert done.returncode != 0
    assert not (tmp_path / "t2.json").exists() and not (tmp_path / "t1.json").read_text().endswith("]\n")
    files = [tmp_path / f"t{rank}.json" for rank in range(2)]
    summary = json.loads(trace("summary", "--json", *files, cwd=tmp_path))
    assert summary["collectives"] >= 10 and any("t1.json: ends early" in note for note in summary["notes"])
    trace("merge", *files, "-o", "all.json", cwd=tmp_path)
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    barriers = [event["pid"] for event in events if event["ph"] == "B" and event["name"] == "barrier"]
    assert barriers.count(1) >= 10


@pytest.mark.any_mpi
def test_clocks_of_several_machines_are_compared_repeatedly(mpirun, tmp_path):
    """Ranks are made to believe that they are on separate machines; their clocks are really one."""
    done = mpirun(
        3,
        """
import os
import commlib.observe.clocks as clocks
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
clocks.clock_id = lambda: f"machine {min(rank, 1)}"
import commlib
comm = commlib.init()
comm.barrier()
comm.runtime.recording.stop_timeline()
with commlib.timeline("again{rank}.json"):
    comm.barrier()
""",
        env={"COMMLIB_TIMELINE": str(tmp_path / "t{rank}.json")},
    )
    assert done.returncode == 0, done.stderr
    for name, comparisons in (("t", 1), ("again", 2)):
        for rank in (1, 2):
            events = json.loads((tmp_path / f"{name}{rank}.json").read_text())
            clocks = [event["args"] for event in events if event.get("name") == "commlib_clock"]
            assert len(clocks) == comparisons
            assert all(abs(one["offset_ns"]) <= one["error_ns"] and one["to"] == 0 for one in clocks), clocks
        output = trace("merge", *(f"{name}{rank}.json" for rank in range(3)), "-o", "all.json", cwd=tmp_path)
        assert "of 3 ranks (one clock, measured by messages)" in output


@pytest.mark.any_mpi
def test_an_unwritable_timeline_on_one_rank_is_refused_on_all(mpirun, tmp_path):
    (tmp_path / "t1.json").mkdir()
    done = mpirun(
        2,
        HEAD
        + """
comm = commlib.init()
try:
    commlib.timeline("t{rank}.json")
except commlib.UsageError as error:
    print("refused:", error)
comm.barrier()
with commlib.timeline("again{rank}.json"):  # nothing is left of the first one
    comm.barrier()
    try:
        commlib.timeline("twice.json")
    except commlib.UsageError:
        print("twice")
commlib.shutdown()
commlib.init()
handle = commlib.timeline("life2-{rank}.json")
commlib.world().barrier()
handle.stop()
handle.stop()
commlib.shutdown()
""",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(lines) == 2 and all("timeline: rank 1: " in line and "cannot write" in line for line in lines)
    assert done.stdout.count("twice") == 1  # on rank 0: the path is that of its file
    for name in ("again0", "again1", "life2-0", "life2-1"):
        events = json.loads((tmp_path / f"{name}.json").read_text())
        assert any(event["ph"] == "B" and event["name"] == "barrier" for event in events), name


@pytest.mark.long
@pytest.mark.any_mpi
def test_a_pytorch_profile_keeps_its_place(mpirun, tmp_path):
    """A barrier's PyTorch profile is around that barrier in the merged trace, on both ranks."""
    pytest.importorskip("torch")
    done = mpirun(
        2,
        HEAD
        + """
import torch
from torch.profiler import ProfilerActivity, profile, record_function
comm = commlib.init()
comm.barrier()
with commlib.timeline("t{rank}.json"), profile(activities=[ProfilerActivity.CPU]) as profiled:
    for _ in range(5):
        time.sleep(0.02)
        with record_function("around"):
            comm.barrier()
profiled.export_chrome_trace(f"torch{comm.rank}.json")
comm.barrier()
print("fine")
""",
    )
    assert done.stdout.count("fine") == 2, done.stderr
    names = [*(f"t{rank}.json" for rank in range(2)), *(f"torch{rank}.json" for rank in range(2))]
    trace("merge", *names, "-o", "all.json", cwd=tmp_path)
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    for rank in range(2):
        around = [
            e for e in events if e.get("name") == "around" and named[e["pid"]].startswith(f"rank {rank}: PyTorch")
        ]
        barriers = [e["ts"] for e in events if e.get("name") == "barrier" and e["ph"] == "B" and e["pid"] == rank]
        around.sort(key=lambda event: event["ts"])
        assert len(around) == len(barriers) == 5
        for outer, began in zip(around, barriers, strict=True):
            assert outer["ts"] - 1000 < began < outer["ts"] + outer["dur"] + 1000  # us; the sleeps are of 20 ms


@pytest.mark.long
@pytest.mark.any_mpi
def test_buckets_codecs_and_steps_of_gradients_are_in_the_timeline(mpirun, tmp_path):
    pytest.importorskip("torch")
    done = mpirun(
        2,
        HEAD
        + """
import torch
import commlib_torch as ct
comm = commlib.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
optimizer = ct.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), ranks=comm, bucket_cap_mib=0.02,
    overlap=True, compression="int8", compress_within_node=True,
)
with commlib.timeline("t{rank}.json"):
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
""",
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        events = json.loads((tmp_path / f"t{rank}.json").read_text())
        buckets = [event for event in events if event.get("cat") == "bucket"]
        launched = [event for event in buckets if "launched" in event["name"]]
        assert len(launched) >= 2 * 3 * 4 and [event["ph"] for event in launched].count("b") == len(launched) / 2
        assert {event["name"] for event in events if event.get("cat") == "codec"} >= {"encode", "add up", "decode"}
        assert sum(event.get("cat") == "step" for event in events) == 4
    summary = json.loads(trace("summary", "--json", "t0.json", "t1.json", cwd=tmp_path))
    assert summary["steps"]["marked_by"] == "gradients" and summary["ranks"][0]["codec"] > 0


@pytest.mark.long
@pytest.mark.any_mpi
def test_pipeline_stages_and_their_waits(mpirun, tmp_path):
    pytest.importorskip("torch")
    done = mpirun(
        2,
        HEAD
        + """
import torch
import commlib_torch as ct
comm = commlib.init()
class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)
model = torch.nn.Sequential(Slow(8, 8), torch.nn.Linear(8, 8))
pipe = ct.pipeline(model, comm, schedule="1f1b", microbatches=4, loss=torch.nn.functional.mse_loss, split=[1, 1])
x = torch.ones(8, 8)
pipe.step(x, x)
with commlib.timeline("t{rank}.json"):
    for _ in range(3):
        pipe.step(x, x)
""",
    )
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "t1.json").read_text())
    actions = [event["name"] for event in events if event.get("cat") == "pipeline" and event["ph"] == "B"]
    assert actions.count("1F0") == 3 and actions.count("1RECV_F3") == 3 and actions.count("1B3") == 3
    summary = json.loads(trace("summary", "--json", "t0.json", "t1.json", cwd=tmp_path))
    assert summary["steps"]["marked_by"] == "pipeline" and summary["steps"]["count"] == 3
    assert (
        summary["ranks"][1]["lost_for"]["0"] > 0.03
    )  # of 3 times 4 times 5 ms, and each rank starts a step at its own time
