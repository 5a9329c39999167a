"""`commlib bench sweep` from the command line: several worlds in one job, a kill, and resuming."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.any_mpi

SWEEP = ("-m", "commlib", "bench", "sweep")
PLAN = """
verbs = ["all_reduce", "barrier"]
sizes = ["4K", "64K"]
algorithms = ["auto", "rnig"]
ranks_per_node = [1, "all", 9]
peers = ["mpi"]
rounds = 1
iters = 2
"""
CASES = 10
# Kills the only rank that measures in the fourth case, while the other one sleeps.
KILLED = """
import os, signal, sys
from commlib.bench.sweep import run

measure, began = run.measure, 0

def killed(*arguments):
    global began
    began += 1
    if began == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*arguments)

run.measure = killed
sys.argv = ["commlib", "bench", "sweep", *sys.argv[1:]]
from commlib.cli import main
main()
"""


def lines_of(path, kind):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.long  # tests/slurm resumes a sweep as well
def test_a_sweep_resumes_after_a_kill(mpirun, tmp_path):
    plan, out, program = tmp_path / "plan.toml", tmp_path / "results" / "all.jsonl", tmp_path / "killed.py"
    plan.write_text(PLAN)
    program.write_text(KILLED)
    arguments = [str(plan), "--out", str(out)]
    done = mpirun(2, [str(program), *arguments], timeout=120)
    assert done.returncode != 0
    first = lines_of(out, "case")
    assert len(first) == 3 and len(lines_of(out, "begun")) == 4
    with out.open("a") as file:
        file.write('{"kind": "ca')  # the result of a killed node
    done = mpirun(2, [*SWEEP, *arguments], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an incomplete last line is cut off, 12 bytes" in done.stdout
    assert f"# {CASES} cases, 3 of them are already in {out}" in done.stdout
    assert "# left out: ranks_per_node = 9 with nodes = 1" in done.stdout
    assert "# measured: 3 refused, 4 ok" in done.stdout
    cases = lines_of(out, "case")
    assert cases[:3] == first and len({line["key"] for line in cases}) == len(cases) == CASES
    by_status = {status: [line for line in cases if line["status"] == status] for status in ("ok", "refused")}
    assert [len(lines) for lines in by_status.values()] == [6, 4]
    assert all("has no algorithm 'rnig'" in line["reason"] for line in by_status["refused"])
    for line in by_status["ok"]:
        assert line["row"]["ranks"] == line["case"]["ranks_per_node"] * line["case"]["nodes"]
        assert set(line["row"]["seconds"]) == {"commlib", "mpi"}
    assert {line["row"]["ranks"] for line in by_status["ok"]} == {1, 2}
    assert "the plan has changed" not in done.stdout


def test_a_changed_plan_a_case_that_aborts_jobs_and_a_wrong_result(mpirun, tmp_path):
    out = tmp_path / "results.jsonl"
    flags = ["--size", "4K", "--rounds", "1", "--iters", "2", "--out", str(out)]
    assert mpirun(2, [*SWEEP, *flags, "--verb", "gather"], timeout=120).returncode == 0
    bad = "1x2 all_reduce float32 sum auto in-place symmetric 4096"
    with out.open("a") as file:
        file.write(f'{{"kind": "begun", "key": "{bad}"}}\n' * 2)
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    verbs = ["--verb", "gather", "--verb", "all_reduce", "--verb", "broadcast", "--verb", "all_gather"]
    done = mpirun(2, [str(program), *flags, *verbs], timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "# the plan has changed" in done.stdout
    assert "#   verbs: gather before, gather, all_reduce, broadcast, all_gather now" in done.stdout
    assert f"{bad}: ended the job 2 times" in done.stdout
    assert "# measured: 1 wrong, 1 failed" in done.stdout
    status = {line["case"]["verb"]: line for line in lines_of(out, "case")}
    assert {verb: line["status"] for verb, line in status.items()} == {
        "gather": "ok",
        "all_reduce": "failed",
        "broadcast": "wrong",
        "all_gather": "failed",
    }
    assert "ValueError: no such luck" in status["all_gather"]["reason"]
    assert [line["number"] for line in lines_of(out, "environment")] == [0, 1]
    assert {verb: line.get("environment") for verb, line in status.items()} == {
        "gather": 0,
        "all_reduce": None,  # it was not measured
        "broadcast": 1,
        "all_gather": 1,
    }


# A broadcast that is wrong on one rank, and an all_gather that fails on all of them after the contenders are tried.
BROKEN = """
import sys
from commlib.bench import commlib_contender
from commlib.bench.session import Session

right, contenders = commlib_contender.call, Session.contenders

def broken(comm, case, **options):
    call = right(comm, case, **options)
    def run():
        call()
        if comm.rank == 1 and case.verb.name == "broadcast":
            case.x[0] += 1
    return run

def unlucky(self, case):
    if case.verb.name == "all_gather":
        raise ValueError("no such luck")
    return contenders(self, case)

commlib_contender.call, Session.contenders = broken, unlucky
sys.argv = ["commlib", "bench", "sweep", *sys.argv[1:]]
from commlib.cli import main
main()
"""


def test_wrong_usage_is_reported_once_with_exit_code_2(mpirun, tmp_path):
    out = tmp_path / "other.jsonl"
    out.write_text("a song\n")
    done = mpirun(2, [*SWEEP, "--out", str(out)])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("line 1: not a line of a sweep's results") == 1 and "Traceback" not in done.stderr


# Two ranks that measure; the second rank never reaches one of the cases.
STUCK = """
import sys, time
from commlib.bench.sweep import run

measure = run.measure

def stuck(world, *arguments):
    if world.comm.rank == 1:
        time.sleep(1000)
    return measure(world, *arguments)

run.measure = stuck
sys.argv = ["commlib", "bench", "sweep", *sys.argv[1:]]
from commlib.cli import main
main()
"""


def test_a_case_that_does_not_end_ends_the_job(mpirun, tmp_path):
    out, program = tmp_path / "results.jsonl", tmp_path / "stuck.py"
    program.write_text(STUCK)
    done = mpirun(2, [str(program), "--size", "4K", "--case-seconds", "2", "--out", str(out)], timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("takes more than 2 s (--case-seconds), so the job ends") == 1
    assert "measuring.py" in done.stderr  # where it was
    assert len(lines_of(out, "begun")) == 1 and not lines_of(out, "case")


def test_a_sweep_without_time_leaves_the_rest_to_the_next_start(mpirun, tmp_path):
    out = tmp_path / "all.jsonl"
    arguments = [*SWEEP, "--size", "4K", "--size", "64K", "--rounds", "1", "--iters", "2", "--out", str(out)]
    done = mpirun(2, [*arguments, "--verb", "all_to_all_v", "--peer", "ordinary", "--peer", "mpi", "--seconds", "1e-6"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# no time was left for 2 cases (--seconds): start it again with the same file" in done.stdout
    assert not lines_of(out, "case")
    done = mpirun(2, [*arguments, "--verb", "all_to_all_v", "--peer", "ordinary", "--peer", "mpi"])
    assert done.returncode == 0, done.stdout + done.stderr
    cases = lines_of(out, "case")
    assert [(case["status"], set(case["row"]["seconds"])) for case in cases] == [
        ("ok", {"commlib", "ordinary", "mpi"})
    ] * 2


def test_a_rank_without_a_gpu_is_named_before_any_measurement(mpirun, tmp_path):
    if find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    for command in ([*SWEEP, "--out", str(tmp_path / "all.jsonl")], ["-m", "commlib", "bench", "all_reduce"]):
        done = mpirun(2, [*command, "--device", "cuda"])
        message = " ".join(done.stderr.split())
        assert done.returncode == 2 and "--device cuda: ranks 0-1: arrays on a GPU need CuPy" in message, message
        assert "start ranks only on nodes with a GPU, which they may share, or leave out --device" in message
    assert not (tmp_path / "all.jsonl").exists()
