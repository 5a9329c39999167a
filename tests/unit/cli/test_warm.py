"""`commlib warm` compiles the kernels that jobs call, and prints the CPU and the folder."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlib.cli import warm
from commlib.kernels import cache, precompile


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commlib", "warm", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def cached() -> set[str]:
    """The names of all kernels that are compiled ahead, once they are."""
    return {task.compile() for task in precompile.tasks()}


def test_all_kernels_are_cached(cached: set[str]) -> None:
    folder = precompile.folder()
    assert folder is not None
    assert [name for name in cached if not (folder / name).is_file()] == []
    assert len(cached) > 150


WORK = """
from commlib.kernels import cache
read, asked = cache.read, set()
def reading(name):
    asked.add(name)
    return read(name)
cache.read = reading
from tests.bodies import kernel_calls
for work in kernel_calls.WORK:
    work()
print(*sorted(asked))
"""


def test_kernels_of_jobs_are_compiled_ahead(cached: set[str]) -> None:
    """A new kernel of arrays needs its types in `commlib.kernels.precompile`."""
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    requested = set(done.stdout.split())
    assert len(requested) > 80
    assert sorted(requested - cached) == []


def test_a_kernel_of_arrays_has_types_or_is_called_by_another_one() -> None:
    """A name in the table without a kernel would be compiled no more."""
    names = {name for name, _ in precompile.dispatchers()}
    assert set(precompile.ARRAYS) <= names
    assert {task.name.split()[0] for task in precompile.tasks()} >= set(precompile.ARRAYS)
    few = [task.name for task in precompile.tasks(rare=False)]
    assert len(set(few)) == len(few) < len(list(precompile.tasks()))


def test_an_unknown_cpu_is_refused() -> None:
    """LLVM reports no error, and compiles for another CPU."""
    done = run("--cpu", "pentium-9000")
    assert done.returncode == 2 and not done.stdout
    assert "LLVM cannot compile for the CPU 'pentium-9000'" in done.stderr and "x86-64-v3" in done.stderr
    assert warm.refusal("generic") == ""


def test_existing_kernels_are_not_compiled_again(cached: set[str]) -> None:
    done = run("--all", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert f"kernels for {cpu_name()} in {precompile.folder()}: 0 compiled now" in done.stdout


def cpu_name() -> Any:
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name()


NOWHERE = """
import sys
from commlib.kernels import cache
here = cache.Path(sys.argv[1])
cache.candidates = lambda: iter([here])
sys.argv[1:] = ["warm"]
from commlib.cli import main
main()
"""


def test_a_cache_that_cannot_be_written_sets_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file")
    done = subprocess.run([sys.executable, "-c", NOWHERE, nowhere], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "compiled kernels cannot be stored" in done.stderr and nowhere in done.stderr


@pytest.mark.long
def test_kernels_for_another_cpu_can_be_loaded_by_a_job(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's limit for a test: all kernels take longer on a busy machine
    home = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    done = run("--cpu", "x86-64-v2", **home)
    assert done.returncode == 0, done.stderr
    assert "kernels for x86-64-v2 in" in done.stdout
    settings = done.stdout.partition("find them: export ")[2].split()
    assert settings == ["NUMBA_CPU_NAME=x86-64-v2", "NUMBA_CPU_FEATURES="]
    (folder,) = (tmp_path / "commlib").iterdir()
    before = set(os.listdir(folder))
    calls = "from tests.bodies import kernel_calls\nkernel_calls.verbs()\n"
    verbs = f"{calls}from commlib.kernels.precompile import folder\nprint(folder())"
    job = {**os.environ, **home, **dict(setting.split("=") for setting in settings)}
    done = subprocess.run([sys.executable, "-c", verbs], env=job, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
    assert set(os.listdir(folder)) == before


def test_warm_uses_the_folder_of_the_cache() -> None:
    assert precompile.folder() == cache.folder()
