"""Compiled kernels are written once and read again, by many processes at once, on any file system."""

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
import pytest
from numba.core.runtime import rtsys

import commlib
from commlib import folders
from commlib.kernels import cache
from commlib.kernels.host import compilation

PROGRAM = """
import sys
import numpy as np
from commlib.execution.reduce_function import ReduceFunction
from commlib.kernels import cache

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
    """Return the folder that was used, and the messages."""
    output, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    return (None if output.strip() == "None" else Path(output.strip())), messages


def run(package, value, *dtypes):
    return finish(start(package, value, *dtypes))


def kernels_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != cache.MARK}


def reduction_in(folder):
    """Return the file of the program's reduction. The other file has the builtin that calls it."""
    (file,) = (path for path in kernels_in(folder) if path.name.startswith("reduce."))
    return file


def refuse_home(package):
    """Root may write anywhere, so a file, not a permission, blocks the folder."""
    shutil.rmtree(package[0] / "home")
    (package[0] / "home").touch()


def test_the_first_run_compiles_and_the_next_loads(package):
    folder_, _ = run(package, 3, "int32")
    assert package[0] / "home/.cache/commlib" == folder_.parent
    files = kernels_in(folder_)
    assert files
    assert run(package, 4, "int32") == (folder_, "")
    assert kernels_in(folder_) == files


def test_installed_files_do_not_change(package):
    """Kernels next to the sources survived `pip uninstall`, and `import commlib` still succeeded."""
    before = sorted((package[0] / "commlib").rglob("*"))
    run(package, 3, "int32")
    assert sorted((package[0] / "commlib").rglob("*")) == before


def test_a_change_of_any_kernel_source_makes_all_of_it_stale(package):
    """numba checks only the function's own file, and would reuse old code of functions that it calls."""
    folder_, _ = run(package, 3, "int32")
    files = kernels_in(folder_)
    with open(package[0] / "commlib/kernels/host/intrinsics.py", "a") as file:
        file.write("# changed\n")
    changed, _ = run(package, 3, "int32")
    assert changed != folder_ and kernels_in(changed)
    assert kernels_in(folder_) == files  # a checkout of another version keeps using its own


def test_the_users_cache_setting_is_used(package):
    refuse_home(package)
    package[1]["XDG_CACHE_HOME"] = str(package[0] / "cache")
    folder_, _ = run(package, 3, "int32")
    assert folder_.parent == package[0] / "cache/commlib"


def test_an_unwritable_cache_is_replaced_by_a_temporary_folder(package):
    refuse_home(package)
    folder_, _ = run(package, 3, "int32")
    assert package[0] / "tmp" in folder_.parents


def test_a_cache_that_others_can_write_is_replaced_by_a_temporary_folder(package):
    """A user who can rename a folder above the kernels can replace them, and his code would run."""
    (package[0] / "home").chmod(0o777)
    folder_, _ = run(package, 3, "int32")
    assert package[0] / "tmp" in folder_.parents
    assert not list((package[0] / "home").iterdir())


def test_processes_can_compile_different_kernels_at_once(package):
    """Two that added to one index at the same time could each take the other's code for their own."""
    dtypes = ["int8", "int32", "float32"]
    for value in (3, 4):
        started = [start(package, value, dtype) for dtype in dtypes]
        assert len({finish(process)[0] for process in started}) == 1


def test_processes_compile_a_kernel_once(package):
    """Every rank compiled every kernel on a first run."""
    counting = """
import sys
from commlib.kernels import cache
write = cache.write
cache.write = lambda name, data: (print("compiled", name, file=sys.stderr), write(name, data))
"""
    command = [sys.executable, "-c", counting + PROGRAM, "3", "int32", "float32"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, env=package[1], stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    messages = [finish(process)[1] for process in started]
    assert sum(text.count("compiled reduce.reduction") for text in messages) == 2, messages


def test_a_damaged_kernel_is_named_and_compiled_again(package):
    """Each job ended with an EOFError or UnpicklingError that named no file."""
    folder_, _ = run(package, 3, "int32")
    file = reduction_in(folder_)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    again, messages = run(package, 3, "int32")
    first, *more = messages.splitlines()
    assert (again, first) == (folder_, f"the compiled kernel {file} is damaged: it is compiled again")
    assert all(line.startswith("compiling kernels for this kind of CPU") for line in more)  # printed after a second
    assert len(file.read_bytes()) == len(content)
    assert run(package, 3, "int32") == (folder_, "")


def test_an_unloadable_kernel_is_compiled_again(package, monkeypatch):
    """As when numba was exchanged for another one of the same version."""
    folder_, _ = run(package, 3, "int32")
    file = reduction_in(folder_)
    monkeypatch.setattr(cache, "folder", lambda: folder_)  # this process has the same sources, and so the same stamp
    cache.write(file.name, pickle.dumps(("not", "a", "kernel")))
    _, messages = run(package, 3, "int32")
    assert f"the compiled kernel {file} cannot be loaded (" in messages
    assert run(package, 3, "int32") == (folder_, "")


def test_the_compiler_is_imported_only_to_compile(package):
    """Every start took 0.3 s longer for it, on every rank."""
    folder, environment = package
    program = PROGRAM + "print('numba' in sys.modules)"
    command = [sys.executable, "-c", program, "3", "int32"]
    for compiles in (True, False):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.splitlines()[1:] == [str(compiles)], done.stderr


def test_symbols_are_defined_before_code_is_loaded(monkeypatch):
    """LLVM ends the process if a symbol is missing. The costly lookup comes last, and only if a symbol is missing."""
    queried, there, symbol = [], "commlib_test_there", "commlib_test_missing"
    llvm.add_symbol(there, 1)
    monkeypatch.setattr(rtsys, "initialize", lambda context: queried.append("run time"))

    class Context:
        def refresh(self):
            queried.append("everything")
            llvm.add_symbol(symbol, 1)

    compilation.provide([], Context())
    compilation.provide([there], Context())
    assert queried == []
    for _ in range(2):
        compilation.provide([there, symbol], Context())
        assert queried == ["run time", "everything"]


@pytest.fixture
def kept_here(tmp_path, monkeypatch):
    """A folder of kernels for this process."""
    monkeypatch.setattr(folders, "user_cache", lambda: tmp_path / "home" / "commlib")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
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
def test_damaged_files_are_removed_and_reported_once(kept_here, caplog, damage):
    cache.write("a", b"some code")
    file = place() / "a"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert cache.read("a") is cache.read("a") is None
    (record,) = caplog.records
    assert record.getMessage() == f"the compiled kernel {file} is damaged: it is compiled again"
    cache.write("a", b"some code")
    assert cache.read("a") == b"some code"


def test_exchanged_kernels_are_not_mixed_up(kept_here, caplog):
    """numba read an index, and ran any code in the file named there."""
    cache.write("a", b"code of a")
    cache.write("b", b"code of b")
    shutil.copyfile(place() / "a", place() / "b")
    assert (cache.read("a"), cache.read("b")) == (b"code of a", None)
    assert f"{place() / 'b'} is damaged" in caplog.text


def test_folders_are_checked_at_each_load(kept_here, caplog):
    """They were checked once, at the start: a file exchanged later was unpickled."""
    cache.write("a", b"code")
    assert cache.read("a") == b"code"
    kept_here.parent.chmod(0o777)
    assert cache.read("a") is cache.read("a") is None
    (record,) = caplog.records  # once
    assert f"{kept_here.parent} may be written by everyone (chmod go-w {kept_here.parent})" in record.getMessage()
    kept_here.parent.chmod(0o755)
    assert cache.read("a") == b"code"


def test_without_a_private_folder_each_process_compiles(kept_here, tmp_path, monkeypatch, caplog):
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    monkeypatch.setattr(cache, "candidates", lambda: iter([kept_here]))
    assert cache.folder() is cache.folder() is None
    cache.write("a", b"code")
    assert cache.read("a") is None
    (record,) = caplog.records
    for word in ("cannot be stored", f"{tmp_path / 'home'} may be written by everyone", "Set XDG_CACHE_HOME"):
        assert word in record.getMessage()


def test_a_full_disk_is_reported_once_and_is_not_fatal(kept_here, monkeypatch, caplog):
    assert cache.folder()

    def fail(*args):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(folders, "write_private", fail)
    cache.write("a", b"code")
    cache.write("b", b"code")
    (record,) = caplog.records
    assert "cannot be stored in" in record.getMessage() and "Disk quota exceeded" in record.getMessage()


def test_long_unused_files_are_removed(kept_here):
    """With a folder for each version, old folders would accumulate for ever."""
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


def test_every_cached_kernel_uses_this_cache():
    for path in Path(cache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "cache":
                pytest.fail(f"{path}:{node.value.lineno}: numba's own cache; use commlib.kernels.compiled.kernel")
