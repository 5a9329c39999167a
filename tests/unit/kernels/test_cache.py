"""Compiled kernels are written once and found again, by many processes at once, on any file system."""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest
from numba.core.runtime import rtsys

import commlib
from commlib import folders
from commlib.kernels.host import cache, compilation

PROGRAM = """
import sys
import numpy as np
from commlib.execution.reduce_function import ReduceFunction
from commlib.kernels.host import cache

for dtype in sys.argv[2:]:
    first, second = np.full(100, int(sys.argv[1]), dtype), np.full(100, 1, dtype)
    ReduceFunction(dtype, "sum").combine([first, second], second)
    assert (second == int(sys.argv[1]) + 1).all(), second
print(cache.folder())
"""


@pytest.fixture
def package(tmp_path):
    """A copy of commlib without compiled kernels, and an environment with a home of its own."""
    shutil.copytree(Path(commlib.__file__).parent, tmp_path / "commlib", ignore=shutil.ignore_patterns("__pycache__"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (tmp_path / "tmp").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        environment.pop(name, None)
    return tmp_path, environment


def start(package, value, *dtypes):
    folder, environment = package
    command = [sys.executable, "-c", PROGRAM, str(value), *dtypes]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process):
    """Return the folder that was used, and what was said."""
    output, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return (None if output.strip() == "None" else Path(output.strip())), said


def run(package, value, *dtypes):
    return finish(start(package, value, *dtypes))


def kernels_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != cache.MARK}


def refuse_home(package):
    """Root may write anywhere, so what stands in the way is not a permission but a file."""
    shutil.rmtree(package[0] / "home")
    (package[0] / "home").touch()


def test_the_first_run_compiles_and_the_next_finds_it(package):
    kept, _ = run(package, 3, "int32")
    assert package[0] / "home/.cache/commlib" == kept.parent
    files = kernels_in(kept)
    assert files
    assert run(package, 4, "int32") == (kept, "")
    assert kernels_in(kept) == files


@pytest.mark.long
def test_what_is_installed_stays_as_it_was(package):
    """Kernels lay beside the sources: `pip uninstall` left them, and `import commlib` went on succeeding."""
    before = sorted((package[0] / "commlib").rglob("*"))
    run(package, 3, "int32")
    assert sorted((package[0] / "commlib").rglob("*")) == before


def test_a_change_of_any_kernel_source_makes_all_of_it_stale(package):
    """numba looks at the function's own file alone, and would go on with old code of what it includes."""
    kept, _ = run(package, 3, "int32")
    files = kernels_in(kept)
    with open(package[0] / "commlib/kernels/host/intrinsics.py", "a") as file:
        file.write("# changed\n")
    changed, _ = run(package, 3, "int32")
    assert changed != kept and kernels_in(changed)
    assert kernels_in(kept) == files  # a checkout of another version goes on with its own


@pytest.mark.long
def test_where_the_users_cache_is_elsewhere_that_is_used(package):
    refuse_home(package)
    package[1]["XDG_CACHE_HOME"] = str(package[0] / "cache")
    kept, _ = run(package, 3, "int32")
    assert kept.parent == package[0] / "cache/commlib"


@pytest.mark.long
def test_where_it_cannot_be_written_a_temporary_folder_is_used(package):
    refuse_home(package)
    kept, _ = run(package, 3, "int32")
    assert package[0] / "tmp" in kept.parents


@pytest.mark.long
def test_where_others_may_write_a_temporary_folder_is_used(package):
    """Whoever can rename a folder above the kernels can put his own in their place, and they would be run."""
    (package[0] / "home").chmod(0o777)
    kept, _ = run(package, 3, "int32")
    assert package[0] / "tmp" in kept.parents
    assert not list((package[0] / "home").iterdir())


@pytest.mark.long
def test_many_processes_may_compile_different_things_at_once(package):
    """Two that added to one index at the same time could each take the other's code for their own."""
    dtypes = ["int8", "int32", "float32"]
    for value in (3, 4):
        started = [start(package, value, dtype) for dtype in dtypes]
        assert len({finish(process)[0] for process in started}) == 1


def test_many_processes_compile_one_thing_once(package):
    """Every rank compiled every kernel on a first run."""
    counting = """
import sys
from commlib.kernels.host import cache
write = cache.write
cache.write = lambda name, data: (print("compiled", name, file=sys.stderr), write(name, data))
"""
    command = [sys.executable, "-c", counting + PROGRAM, "3", "int32", "float32"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, env=package[1], stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    said = [finish(process)[1] for process in started]
    assert sum(text.count("compiled reduce.reduce") for text in said) == 2, said


def test_a_damaged_kernel_is_named_and_compiled_anew(package):
    """Each job ended with an EOFError or UnpicklingError that named no file."""
    kept, _ = run(package, 3, "int32")
    (file,) = kernels_in(kept)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    again, said = run(package, 3, "int32")
    first, *more = said.splitlines()
    assert (again, first) == (kept, f"the compiled kernel {file} is damaged: it is compiled again")
    assert all(line.startswith("compiling kernels for this kind of CPU") for line in more)  # said after a second
    assert len(file.read_bytes()) == len(content)
    assert run(package, 3, "int32") == (kept, "")


@pytest.mark.long
def test_a_whole_kernel_that_cannot_be_loaded_is_compiled_anew(package, monkeypatch):
    """As when numba was exchanged for another one of the same version."""
    kept, _ = run(package, 3, "int32")
    (file,) = kernels_in(kept)
    monkeypatch.setattr(cache, "folder", lambda: kept)  # this process has the same sources, and so the same stamp
    cache.write(file.name, pickle.dumps(("not", "a", "kernel")))
    _, said = run(package, 3, "int32")
    assert f"the compiled kernel {file} cannot be loaded (" in said
    assert run(package, 3, "int32") == (kept, "")


def test_what_numba_needs_to_compile_is_not_loaded_where_nothing_is_compiled(package):
    """Every start took 0.3 s longer: SciPy, and all of Python and numpy that numba can compile, for nothing."""
    folder, environment = package
    program = PROGRAM + "print('numba.np.arraymath' in sys.modules)"
    command = [sys.executable, "-c", program, "3", "int32"]
    for compiles in (True, False):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.splitlines()[1:] == [str(compiles)], done.stderr


def test_what_code_refers_to_is_brought_in_before_it_is_loaded(monkeypatch):
    """LLVM ends the process if a symbol is missing. What costs more comes last, and not if nothing is missing."""
    asked, there, symbol = [], "commlib_test_there", "commlib_test_missing"
    llvm.add_symbol(there, 1)
    monkeypatch.setattr(rtsys, "initialize", lambda context: asked.append("run time"))

    class Context:
        def refresh(self):
            asked.append("everything")
            llvm.add_symbol(symbol, 1)

    compilation.provide([], Context())
    compilation.provide([there], Context())
    assert asked == []
    for _ in range(2):
        compilation.provide([there, symbol], Context())
        assert asked == ["run time", "everything"]


@pytest.fixture
def kept_here(tmp_path, monkeypatch):
    """A folder of kernels for this process."""
    monkeypatch.setattr(folders, "user_cache", lambda: tmp_path / "home" / "commlib")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for cached in (cache.folder, cache.log_once):
        cached.cache_clear()
    yield tmp_path / "home" / "commlib"
    for cached in (cache.folder, cache.log_once):
        cached.cache_clear()


def place():
    folder = cache.folder()
    assert folder is not None
    return folder


DAMAGES = {
    "truncated": lambda content: content[:40],
    "empty": lambda content: b"",
    "changed": lambda content: content[:-1] + b"?",
    "of another format": lambda content: pickle.dumps("0.60.0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_removed_and_said_once(kept_here, caplog, damage):
    cache.write("a", b"some code")
    file = place() / "a"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert cache.read("a") is cache.read("a") is None
    (record,) = caplog.records
    assert record.getMessage() == f"the compiled kernel {file} is damaged: it is compiled again"
    cache.write("a", b"some code")
    assert cache.read("a") == b"some code"


def test_kernels_that_were_exchanged_are_not_taken_for_each_other(kept_here, caplog):
    """numba looked at an index, and ran whatever the file held that it names."""
    cache.write("a", b"code of a")
    cache.write("b", b"code of b")
    shutil.copyfile(place() / "a", place() / "b")
    assert (cache.read("a"), cache.read("b")) == (b"code of a", None)
    assert f"{place() / 'b'} is damaged" in caplog.text


def test_folders_are_looked_at_at_each_load(kept_here, caplog):
    """They were looked at once, at the start: whoever exchanged one later had his file unpickled."""
    cache.write("a", b"code")
    assert cache.read("a") == b"code"
    kept_here.parent.chmod(0o777)
    assert cache.read("a") is cache.read("a") is None
    (record,) = caplog.records  # once
    assert f"{kept_here.parent} may be written by everyone (chmod go-w {kept_here.parent})" in record.getMessage()
    kept_here.parent.chmod(0o755)
    assert cache.read("a") == b"code"


def test_where_nothing_is_private_each_process_compiles_for_itself(kept_here, tmp_path, monkeypatch, caplog):
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    monkeypatch.setattr(cache, "candidates", lambda: iter([kept_here]))
    assert cache.folder() is cache.folder() is None
    cache.write("a", b"code")
    assert cache.read("a") is None
    (record,) = caplog.records
    for word in ("cannot be stored", f"{tmp_path / 'home'} may be written by everyone", "Set XDG_CACHE_HOME"):
        assert word in record.getMessage()


def test_a_full_disk_is_said_once_and_ends_nothing(kept_here, monkeypatch, caplog):
    assert cache.folder()

    def fail(*args):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(folders, "write_private", fail)
    cache.write("a", b"code")
    cache.write("b", b"code")
    (record,) = caplog.records
    assert "cannot be stored in" in record.getMessage() and "Disk quota exceeded" in record.getMessage()


def test_what_nobody_has_used_for_long_is_removed(kept_here):
    """With a folder for each version, those of old ones would add up for ever."""
    long_ago, lately = time.time() - 31 * 24 * 3600, time.time() - 29 * 24 * 3600
    kept_here.mkdir(parents=True)
    (kept_here / "tuning.json").touch()
    for name, when in (("kernels-old", long_ago), ("kernels-young", lately), ("other-old", long_ago)):
        (kept_here / name).mkdir()
        (kept_here / name / "file").touch()
        os.utime(kept_here / name, (when, when))
    used = cache.folder()
    assert used is not None
    assert {path.name for path in kept_here.iterdir()} == {"kernels-young", "other-old", "tuning.json", used.name}
    (used / "x.new").touch()
    os.utime(used / "x.new", (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    cache.folder.cache_clear()
    assert cache.folder() == used
    assert time.time() - used.stat().st_mtime < 3600
    assert not (used / "x.new").exists()


def test_every_kernel_that_is_kept_is_kept_by_this_cache():
    for path in Path(cache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "cache":
                pytest.fail(f"{path}:{node.value.lineno}: numba's own cache; use commlib.kernels.compiled.kernel")
