"""`commlib bench step`: every kind of parallelism trains as one process does, and is compared with it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.any_mpi

KINDS = ("dp", "tp", "pp", "moe")
# Every kind in one job, as starting takes longer than all of them; then one with wrong losses.
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

from commlib.bench.steps import run
from commlib.bench.steps.contract import StepSizes

framework, out = sys.argv[1], Path(sys.argv[2])
sizes = StepSizes(width=16, layers=2, heads=2, context=8, rows=4, microbatches=2, experts=4)
for kind in ("dp", "tp", "pp", "moe"):
    peer = (kind, framework) == ("dp", "torch")
    assert run.run(kind, framework, sizes, number=2, iters=1, peer=peer, out=out), kind

import importlib
adapter = importlib.import_module(f"commlib_{framework}.bench_step")
right = adapter.contenders

def off(kind, comm, sizes, *, peer):
    found = right(kind, comm, sizes, peer=peer)
    return replace(found, whole=lambda: found.whole() * 1.01)

adapter.contenders = off
assert not run.run("tp", framework, replace(sizes, rows=2), number=1, iters=1, peer=False, out=out)
"""


@pytest.mark.long  # starts of frameworks; tests/unit/bench tests measurements and output
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_kind(mpirun, tmp_path, framework):
    program, out = tmp_path / "steps.py", tmp_path / "steps.jsonl"
    program.write_text(PROGRAM)
    done = mpirun(2, [str(program), framework, str(out)], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["kind_of_step"] for step in steps] == [*KINDS, "tp"]
    assert [step["status"] for step in steps] == ["ok"] * 4 + ["wrong"]
    assert max(step["difference"] for step in steps[:4]) < 1e-4
    assert [step["tokens"] for step in steps] == [2 * 4 * 8, 4 * 8, 4 * 8, 2 * 4 * 8, 2 * 8]
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["step"])
        assert len(step["seconds"]["commlib"]) == len(step["seconds"]["alone"]) and step["alone"] > 0
    assert ("peer" in steps[0]["seconds"]) == (framework == "torch")
    assert "losses  same as in one process" in done.stdout and "losses  NOT as in one process" in done.stdout


def test_wrong_usage(mpirun):
    done = mpirun(2, ["-m", "commlib", "bench", "step", "tp", "--heads", "3", "--width", "12"])
    assert done.returncode == 2 and done.stderr.count("--heads 3 is not divisible") == 1, done.stderr
