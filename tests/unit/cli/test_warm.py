"""`commlib warm` compiles what jobs call, and says for which CPU and where."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commlib.cli import warm
from commlib.kernels import precompile
from commlib.kernels.host import cache


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commlib", "warm", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def kept() -> set[str]:
    """The names of all kernels that are compiled ahead; they are by now."""
    return {task.compile() for task in precompile.tasks()}


def test_all_are_kept(kept: set[str]) -> None:
    folder = precompile.folder()
    assert folder is not None
    assert [name for name in kept if not (folder / name).is_file()] == []
    assert len(kept) > 150


WORK = """
from commlib.kernels.host import cache
read, asked = cache.read, set()
def reading(name):
    asked.add(name)
    return read(name)
cache.read = reading
from tests.bodies import ahead
for work in ahead.WORK:
    work()
print(*sorted(asked))
"""


def test_what_jobs_ask_for_was_compiled_ahead(kept: set[str]) -> None:
    """Whoever adds a kernel of arrays adds their types to `commlib.kernels.precompile`."""
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    asked = set(done.stdout.split())
    assert len(asked) > 80
    assert sorted(asked - kept) == []


def test_a_kernel_of_arrays_has_types_or_is_called_by_another_one() -> None:
    """A name in the table that is no kernel's any more would be compiled no more."""
    names = {name for name, _ in precompile.dispatchers()}
    assert set(precompile.ARRAYS) <= names
    assert {task.name.split()[0] for task in precompile.tasks()} >= set(precompile.ARRAYS)
    few = [task.name for task in precompile.tasks(rare=False)]
    assert len(set(few)) == len(few) < len(list(precompile.tasks()))


def test_a_cpu_that_is_none_is_refused() -> None:
    """LLVM says so to nobody, and compiles for another one."""
    done = run("--cpu", "pentium-9000")
    assert done.returncode == 2 and not done.stdout
    assert "LLVM cannot compile for the CPU 'pentium-9000'" in done.stderr and "x86-64-v3" in done.stderr
    assert warm.refusal("generic") == ""


def test_what_is_there_is_left(kept: set[str]) -> None:
    done = run("--all", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert f"kernels for {cpu_name()} in {precompile.folder()}: 0 compiled now" in done.stdout


def cpu_name() -> Any:
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name()


NOWHERE = """
import sys
from commlib.kernels.host import cache
here = cache.Path(sys.argv[1])
cache.candidates = lambda: iter([here])
sys.argv[1:] = ["warm"]
from commlib.cli import main
main()
"""


def test_where_nothing_can_be_kept_that_is_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file")
    done = subprocess.run([sys.executable, "-c", NOWHERE, nowhere], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "compiled kernels cannot be stored" in done.stderr and nowhere in done.stderr


@pytest.mark.long
def test_another_cpu_and_what_a_job_needs_to_find_it(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # pytest's limit for a test: all kernels take longer on a busy machine
    home = {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    done = run("--cpu", "x86-64-v2", **home)
    assert done.returncode == 0, done.stderr
    assert "kernels for x86-64-v2 in" in done.stdout
    settings = done.stdout.partition("find them: export ")[2].split()
    assert settings == ["NUMBA_CPU_NAME=x86-64-v2", "NUMBA_CPU_FEATURES="]
    (folder,) = (tmp_path / "commlib").iterdir()
    before = set(os.listdir(folder))
    verbs = (
        "from tests.bodies import ahead\nahead.verbs()\nfrom commlib.kernels.precompile import folder\nprint(folder())"
    )
    job = {**os.environ, **home, **dict(setting.split("=") for setting in settings)}
    done = subprocess.run([sys.executable, "-c", verbs], env=job, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.strip()) == (0, str(folder)), done.stderr
    assert set(os.listdir(folder)) == before


def test_the_folder_is_the_caches() -> None:
    assert precompile.folder() == cache.folder()
