"""commlib between hosts: jobs on emulated ones, with links between them and no shared memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from ci.hosts import Hosts

ACROSS = "tests/multihost/across.py"
BETWEEN = "tests/multihost/between.py"
DIVIDED = "tests/multihost/divided.py"
# Tests written for one host that hold for several: order, groups, messages.
SHARED = [f"tests/mpi/test_{name}.py" for name in ("groups", "messages")]
MORE_SHARED = [f"tests/mpi/test_{name}.py" for name in ("async", "channel", "mesh", "pipeline")]
# Tests that hold on one host only.
ONE_HOST = ["tests/mpi/test_groups.py::test_node"]


def run_tests(ranks_per_host, tests, *, seconds=240, env=None):
    """Run pytest on ranks on several hosts; fail with its output unless all tests passed there."""
    layout = ",".join(map(str, ranks_per_host))
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "tests.plugins.multirank", *(f"--deselect={test}" for test in ONE_HOST), *tests]
    with Hosts(len(ranks_per_host)) as hosts:
        try:
            done = hosts.run(
                command, ranks_per_host, timeout=seconds, env={"RANKS_PER_HOST": layout, **(env or {})}, capture=True
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"not done after {seconds} s\n{error.stdout!s}\n{error.stderr!s}")
    # A launcher may succeed though a rank did not, so pytest's summary counts too.
    summary = re.search(r"^(\d+) passed.* in [\d.]+s", done.stdout, re.MULTILINE)
    if done.returncode != 0 or summary is None or "failed" in summary[0]:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def layout(*ranks_per_host, marks=()):
    return pytest.param(ranks_per_host, marks=marks, id=str(ranks_per_host))


@pytest.mark.parametrize(
    "ranks_per_host",
    [
        layout(2, 2),
        layout(1, 1, 1, 1, marks=pytest.mark.long),
        layout(2, 1, marks=pytest.mark.any_mpi),
        layout(3, 1, marks=pytest.mark.long),
        layout(2, 2, 1, marks=pytest.mark.long),
    ],
)
def test_every_layout(ranks_per_host):
    run_tests(ranks_per_host, [ACROSS])


@pytest.mark.any_mpi
def test_dtypes_groups_and_messages():
    run_tests([2, 2], [BETWEEN, *SHARED])


@pytest.mark.long
@pytest.mark.any_mpi
def test_order_meshes_pipelines_and_waits():
    run_tests([2, 2], MORE_SHARED)


def test_mismatches():
    """With COMMLIB_CHECK=always the group remains usable after each."""
    run_tests([2, 2], ["tests/mpi/test_mismatch.py"], env={"COMMLIB_CHECK": "always"})


@pytest.mark.long  # axes within and between hosts cover most of it
@pytest.mark.any_mpi
def test_sharded_layers():
    """On an axis that crosses hosts: there a gradient is reduced while that of the weight is computed."""
    run_tests([1, 1, 1], [f"tests/torch_adapter/test_tensor_{name}.py" for name in ("moves", "linear")])


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    "ranks_per_host", [layout(2, 2), *(layout(*each, marks=pytest.mark.long) for each in [(2, 1), (1, 1)])]
)
def test_experts(ranks_per_host):
    """Tokens go to each host once, or to each rank where hosts differ; encoded on request."""
    moe = "tests/torch_adapter/test_moe.py::test_equals_one_rank"
    run_tests(ranks_per_host, ["tests/mpi/test_experts.py", moe])


@pytest.mark.any_mpi
@pytest.mark.long
def test_training_experts():
    names = ("torch_adapter/test_moe_training", "torch_adapter/test_moe", "tensorflow_adapter/test_moe")
    run_tests([2, 2], [f"tests/{name}.py" for name in names])


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks_per_host", [layout(2, 2), layout(2, 1, marks=pytest.mark.long)])
@pytest.mark.parametrize("which", ["not keras", pytest.param("keras", marks=pytest.mark.long)])
def test_axes_within_and_between_hosts(ranks_per_host, which):
    """Of layers and of sequences."""
    pytest.importorskip("tensorflow")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    run_tests(ranks_per_host, [DIVIDED, "-k", which], seconds=400, env=env)


# Ends of jobs

HEAD = """
import os, signal, sys, time
import numpy as np
import commlib
comm = commlib.init()
x = np.ones(5000)
comm.all_reduce(x)
if comm.rank == comm.size - 1:
    print(f"event at {time.time()}", flush=True)
"""
SOON = 10.0  # seconds from the event to the end of the job
LONGEST = 240  # seconds of the whole job: it hangs


def end(tmp_path, program, env=None):
    """Run a program on two hosts with two ranks each; it must end soon after its event."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + program)
    with Hosts(2) as hosts:
        try:
            done = hosts.run([sys.executable, str(script)], 2, timeout=LONGEST, env=env, capture=True)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"not done after {LONGEST} s\n{error.stdout!s}\n{error.stderr!s}")
    times = re.findall(r"event at ([\d.]+)", done.stdout)
    assert times, done.stderr
    assert time.time() - float(times[0]) < SOON, done.stderr
    return done


@pytest.mark.parametrize(
    "wait",
    ["comm.all_reduce(x)", pytest.param("comm.all_reduce_async(x).wait()", marks=pytest.mark.long), "comm.recv(x, 3)"],
)
def test_a_rank_on_another_host_that_raises_ends_the_job(tmp_path, wait):
    done = end(tmp_path, f"if comm.rank == 3:\n    raise ValueError('out of luck')\n{wait}\n")
    assert done.returncode != 0
    assert "commlib: rank 3 of 4 on h1 ended by an uncaught ValueError; aborting the job" in done.stderr


def test_a_rank_on_another_host_that_is_killed_ends_the_job(tmp_path):
    done = end(tmp_path, "if comm.rank == 3:\n    os.kill(os.getpid(), signal.SIGKILL)\ncomm.all_reduce(x)\n")
    assert done.returncode != 0


def test_a_rank_on_another_host_that_exits_is_named(tmp_path):
    done = end(tmp_path, "if comm.rank == 3:\n    sys.exit()\ncomm.all_reduce(x)\n")
    assert done.returncode != 0
    assert re.search(r"PeerError: .*rank 3 has shut commlib down or left the program", done.stderr)


def test_a_missing_rank_on_another_host_ends_the_others_wait(tmp_path):
    program = "if comm.rank == 3:\n    time.sleep(60)\ncomm.all_reduce(x)\n"
    done = end(tmp_path, program, env={"COMMLIB_TIMEOUT": "2"})
    assert done.returncode != 0
    assert re.search(r"StallError: .*", done.stderr)
