"""The first run: kernels are not compiled yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commlib.kernels import cache
from tests.launch.conftest import MpiRun

pytestmark = pytest.mark.any_mpi

PROGRAM = """
import numpy as np
import commlib

comm = commlib.init()
for dtype in ("float32", "float16"):
    for count in (3, 3000):
        x = np.full(count, 2, dtype)
        comm.all_reduce(x, out=x)
        assert (x == 2 * comm.size).all()
comm.broadcast(x)
comm.all_gather(x)
"""

LINE = "compiling kernels for this kind of CPU, once"

KILLED = (
    """
import os, signal
import commlib
from commlib.kernels import cache

write = cache.write
def die(name, data):  # while it holds the kernel's lock, and the others wait for it
    os.kill(os.getpid(), signal.SIGKILL)
cache.write = die
"""
    + PROGRAM
)


@pytest.fixture
def incomplete_cache(tmp_path: Path) -> dict[str, str]:
    """Settings of a cache that lacks some kernels, and without numba's own cache: compiling all takes 20 s."""
    original = cache.folder()
    assert original is not None
    folder = tmp_path / "cache"
    (folder / "commlib").mkdir(0o700, parents=True)
    folder.chmod(0o700)
    copy = shutil.copytree(original, folder / "commlib" / original.name)
    for kernel in copy.glob("reduce.*"):
        kernel.unlink()
    return {"XDG_CACHE_HOME": str(folder), "NUMBA_CACHE_DIR": ""}


def compiles_once(mpirun: MpiRun, ranks: int, incomplete_cache: dict[str, str]) -> None:
    first = mpirun(ranks, PROGRAM, env=incomplete_cache, timeout=100)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count(LINE) == 1, first.stderr
    second = mpirun(ranks, PROGRAM, env=incomplete_cache)
    assert (second.returncode, second.stderr) == (0, "")


def test_ranks_compile_together_and_one_of_them_reports_it(mpirun: MpiRun, incomplete_cache: dict[str, str]) -> None:
    """Every rank compiled every kernel, and none reported it."""
    compiles_once(mpirun, 4, incomplete_cache)


@pytest.mark.long
def test_ranks_with_an_empty_cache_compile_together(mpirun: MpiRun, tmp_path: Path) -> None:
    compiles_once(mpirun, 4, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""})


@pytest.mark.long
def test_a_rank_killed_while_compiling_ends_its_job_but_not_the_next(
    mpirun: MpiRun, incomplete_cache: dict[str, str]
) -> None:
    assert mpirun(2, KILLED, env=incomplete_cache).returncode != 0
    compiles_once(mpirun, 2, incomplete_cache)
