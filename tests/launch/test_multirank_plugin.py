"""tests/plugins/multirank.py: every test here runs a small suite of its own on two ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

PREAMBLE = """
import os, sys, time, warnings
import pytest
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
"""

RunSuite = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_suite(tmp_path: Path, mpirun: RunSuite) -> RunSuite:
    """Run the text of a test module on `n` ranks."""

    def run(text: str, n: int = 2, seconds: int = 20, ci: str = "") -> subprocess.CompletedProcess[str]:
        suite = tmp_path / "suite"
        suite.mkdir()
        (suite / "pytest.ini").write_text(
            f"[pytest]\nfaulthandler_timeout = {seconds}\nfaulthandler_exit_on_timeout = true\n"
        )
        (suite / "conftest.py").write_text('pytest_plugins = ["tests.plugins.multirank"]\n')
        (suite / "test_it.py").write_text(PREAMBLE + text)
        arguments = ["-m", "pytest", "--color=no", "-p", "no:cacheprovider", str(suite)]
        return mpirun(n, arguments, env={"CI": ci, "BUILD_NUMBER": ""})  # otherwise pytest shortens its summary

    return run


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1]


def test_all_pass_and_only_rank_0_prints(run_suite):
    done = run_suite("def test_a(): pass\ndef test_b(): pass\n")
    assert done.returncode == 0, done
    assert done.stdout.count("2 passed") == 1
    assert "ranks: 2" in done.stdout


@pytest.mark.parametrize("ci", ["", pytest.param("true", marks=pytest.mark.long)])
def test_a_failure_on_rank_1_only_is_shown_once(run_suite, ci):
    text = "def test_a():\n    print('seen', 'there')\n    assert rank == 0\ndef test_b(): pass\n"
    done = run_suite(text, ci=ci)
    assert done.returncode != 0
    assert "1 failed, 1 passed" in last_line(done)
    assert done.stdout.count("--- rank 1:") == 1
    assert done.stdout.count(">       assert rank == 0\n") == 1
    assert done.stdout.count("seen there") == 1
    assert "rank 0:" not in done.stdout
    assert "test_a - assert 1 == 0" in done.stdout  # the summary


def test_a_failed_set_up_on_rank_1_keeps_rank_0_out_of_the_test(run_suite):
    done = run_suite("@pytest.fixture\ndef f():\n    assert rank == 0\ndef test_a(f): MPI.COMM_WORLD.Barrier()\n")
    assert done.returncode != 0
    assert "1 error" in last_line(done)


@pytest.mark.parametrize("ci", [pytest.param("", marks=pytest.mark.long), "true"])
def test_the_same_failure_everywhere_is_shown_once(run_suite, ci):
    done = run_suite("def test_a(): assert 1 == 2\n", ci=ci)
    assert done.returncode != 0
    assert done.stdout.count("--- ranks 0, 1:") == 1
    assert done.stdout.count(">   def test_a(): assert 1 == 2") == 1


def test_a_hang_ends_and_prints_the_stuck_line(run_suite):
    text = "def test_a():\n    if rank == 1:\n        time.sleep(50)  # here\n"
    done = run_suite(text, seconds=3)
    assert done.returncode != 0
    stuck = (PREAMBLE + text).splitlines().index("        time.sleep(50)  # here") + 1
    assert re.search(rf'test_it.py", line {stuck} in test_a', done.stderr), done


def test_a_failure_that_hangs_the_others_is_shown(run_suite):
    done = run_suite("def test_a():\n    assert rank == 0\n    MPI.COMM_WORLD.Barrier()\n", seconds=4)
    assert done.returncode != 0
    assert done.stderr.count("rank 1 failed and still waits for the others") == 1
    assert done.stderr.count(">       assert rank == 0\n") == 1


@pytest.mark.parametrize("death", [pytest.param("os._exit(3)", marks=pytest.mark.long), "os.kill(os.getpid(), 9)"])
def test_a_rank_that_dies_ends_the_job(run_suite, death):
    done = run_suite(f"def test_a():\n    if rank == 1:\n        {death}\n    MPI.COMM_WORLD.Barrier()\n")
    assert done.returncode != 0


def test_a_rank_that_leaves_the_session_ends_the_others(run_suite):
    done = run_suite(
        "def test_a():\n    if rank == 1:\n        pytest.exit('enough', returncode=4)\ndef test_b(): pass\n"
    )
    assert done.returncode != 0
    assert "the ranks went different ways" in done.stdout
    assert "--- rank 1:\nthe end of the session" in done.stdout
    assert "enough" in done.stderr  # rank 1 would have printed this


def test_a_skip_on_one_rank_only_is_a_failure(run_suite):
    done = run_suite("def test_a():\n    if rank == 1:\n        pytest.skip('no')\n")
    assert done.returncode != 0
    assert "the ranks disagree" in done.stdout
    assert re.search("--- rank 1:\nskipped .*no", done.stdout)


def test_skips_and_expected_failures_on_all_ranks_are_unchanged(run_suite):
    done = run_suite("def test_a(): pytest.skip('no')\n@pytest.mark.xfail\ndef test_b(): assert False\n")
    assert done.returncode == 0, done
    assert "1 skipped, 1 xfailed" in last_line(done)


def test_different_tests_on_the_ranks_are_an_error(run_suite):
    done = run_suite("def test_a(): pass\nif rank == 1:\n    def test_b(): pass\n")
    assert done.returncode != 0
    assert "the ranks found different tests" in done.stdout


def test_an_import_error_on_rank_1_is_shown(run_suite):
    done = run_suite("if rank == 1:\n    import not_there\ndef test_a(): pass\n")
    assert done.returncode != 0
    assert "No module named 'not_there'" in done.stdout


def test_the_ranks_marker_skips_on_all_ranks(run_suite):
    """Positional arguments, as in ranks(3), had no effect."""
    text = "@pytest.mark.ranks(min=3)\ndef test_a(): pass\n@pytest.mark.ranks(min=2, max=2)\ndef test_b(): pass\n"
    done = run_suite(text + "@pytest.mark.ranks(3)\ndef test_c(): pass\n")
    assert done.returncode == 0, done
    assert "1 passed, 2 skipped" in last_line(done)
