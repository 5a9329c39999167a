"""The first run: kernels are not compiled yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commlib.kernels.host import cache
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
from commlib.kernels.host import cache

write = cache.write
def die(name, data):  # while it holds the kernel's lock, and the others wait for it
    os.kill(os.getpid(), signal.SIGKILL)
cache.write = die
"""
    + PROGRAM
)


@pytest.fixture
def lacking(tmp_path: Path) -> dict[str, str]:
    """The setting of a cache in which some kernels are not, and that numba's own is not used: all take 20 s."""
    kept = cache.folder()
    assert kept is not None
    here = tmp_path / "cache"
    (here / "commlib").mkdir(0o700, parents=True)
    here.chmod(0o700)
    copy = shutil.copytree(kept, here / "commlib" / kept.name)
    for kernel in copy.glob("reduce.*"):
        kernel.unlink()
    return {"XDG_CACHE_HOME": str(here), "NUMBA_CACHE_DIR": ""}


def compiles_once(mpirun: MpiRun, ranks: int, lacking: dict[str, str]) -> None:
    first = mpirun(ranks, PROGRAM, env=lacking, timeout=100)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count(LINE) == 1, first.stderr
    then = mpirun(ranks, PROGRAM, env=lacking)
    assert (then.returncode, then.stderr) == (0, "")


def test_ranks_compile_together_and_one_of_them_says_so(mpirun: MpiRun, lacking: dict[str, str]) -> None:
    """Every rank compiled every kernel, and none said what it was doing."""
    compiles_once(mpirun, 4, lacking)


@pytest.mark.long
def test_ranks_that_find_nothing_at_all_compile_together(mpirun: MpiRun, tmp_path: Path) -> None:
    compiles_once(mpirun, 4, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""})


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_compiles_ends_the_job_and_not_the_next(
    mpirun: MpiRun, lacking: dict[str, str]
) -> None:
    assert mpirun(2, KILLED, env=lacking).returncode != 0
    compiles_once(mpirun, 2, lacking)
