"""Where compiled kernels are kept: written once, found again, by many processes at once, on any file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import commlib

PROGRAM = """
import sys
import numpy as np
from commlib.executor import Reducer
from commlib.kernels import cache

dtype, start = sys.argv[1], int(sys.argv[2])
first, second = np.full(100, start, dtype), np.full(100, 1, dtype)
Reducer(dtype, "sum").combine([first, second], second)
assert (second == start + 1).all(), second
print(cache.folder())
"""


@pytest.fixture
def package(tmp_path):
    """A copy of commlib without compiled kernels, and an environment in which nothing else can be written."""
    shutil.copytree(Path(commlib.__file__).parent, tmp_path / "commlib", ignore=shutil.ignore_patterns("__pycache__"))
    nowhere = tmp_path / "a-file"
    nowhere.touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(nowhere)}
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    return tmp_path, environment


def start(package, dtype, value):
    folder, environment = package
    command = [sys.executable, "-c", PROGRAM, dtype, str(value)]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return Path(output.strip())


def refuse_writing(package):
    """Root may write anywhere, so what stands in the way is not a permission but a file."""
    (package[0] / "commlib/kernels/__pycache__").touch()


def test_the_first_run_compiles_and_the_next_finds_it(package):
    kept = finish(start(package, "int32", 3))
    assert package[0] in kept.parents
    files = {path: path.stat().st_mtime_ns for path in kept.glob("*.nb?")}
    assert files
    assert finish(start(package, "int32", 4)) == kept
    assert {path: path.stat().st_mtime_ns for path in kept.glob("*.nb?")} == files


def test_a_change_of_any_kernel_source_makes_all_of_it_stale(package):
    """numba looks at the function's own file alone, and would go on with old code of what it includes."""
    kept = finish(start(package, "int32", 3))
    before = {path: path.read_bytes() for path in kept.glob("*.nbi")}
    with open(package[0] / "commlib/kernels/intrinsics.py", "a") as file:
        file.write("# changed\n")
    finish(start(package, "int32", 3))
    assert all(path.read_bytes() != content for path, content in before.items())


def test_where_the_installation_cannot_be_written_the_users_cache_is_used(package, tmp_path):
    refuse_writing(package)
    package[1]["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    kept = finish(start(package, "int32", 3))
    assert tmp_path / "cache" / "commlib" in kept.parents


def test_where_neither_can_be_written_a_temporary_folder_is_used(package, tmp_path):
    refuse_writing(package)
    (tmp_path / "tmp").mkdir()
    package[1]["TMPDIR"] = str(tmp_path / "tmp")
    kept = finish(start(package, "int32", 3))
    assert tmp_path / "tmp" in kept.parents


def test_many_processes_may_compile_different_things_at_once(package):
    """Two that added to one index at the same time could each take the other's code for their own."""
    dtypes = ["int8", "int16", "int32", "float32"]
    for value in (3, 4):
        started = [start(package, dtype, value) for dtype in dtypes]
        assert len({finish(process) for process in started}) == 1
