"""One process compiles a kernel, the others wait for it, but never for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from commlib.kernels import cache, compile_lock

HOLDER = """
import time
from commlib.kernels import compile_lock
with compile_lock.lock_compilation("kernel", lambda: False):
    print("compiling", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels for this process and those that it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # to make tempfile read the environment again
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(compile_lock, "POLL", 0.01)
    cached = (cache.folder, compile_lock.lock_file, compile_lock.delay)
    for function in cached:
        function.cache_clear()
    folder = cache.folder()
    assert folder is not None and tmp_path in folder.parents
    yield folder
    if (locks := compile_lock.lock_file()) is not None:
        os.close(locks)
    for function in cached:
        function.cache_clear()


@pytest.fixture
def holder(shared: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that compiles "kernel", and never ends."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        yield process
        process.kill()


def test_a_waiting_process_continues_with_the_compiled_kernel(holder: subprocess.Popen[str]) -> None:
    answers = iter([False, False, False, True])
    with compile_lock.lock_compilation("kernel", lambda: next(answers)):
        pass
    assert next(answers, None) is None and holder.poll() is None


def test_an_existing_kernel_needs_no_lock(shared: Path) -> None:
    with compile_lock.lock_compilation("kernel", lambda: True):
        assert compile_lock.lock_file.cache_info().currsize == 0


def test_another_kernel_is_not_waited_for(holder: subprocess.Popen[str]) -> None:
    with compile_lock.lock_compilation("another", lambda: False):
        assert holder.poll() is None


def test_a_killed_compiling_process_is_not_waited_for(holder: subprocess.Popen[str]) -> None:
    threading.Timer(0.5, holder.send_signal, [signal.SIGKILL]).start()
    start = time.monotonic()
    with compile_lock.lock_compilation("kernel", lambda: False):
        assert holder.wait(10) == -signal.SIGKILL
    assert 0.4 < time.monotonic() - start < 30


def test_a_stopped_process_is_waited_for_up_to_a_limit(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_lock, "LONGEST_WAIT", 0.6)
    monkeypatch.setattr(compile_lock, "SILENT", 0.2)
    holder.send_signal(signal.SIGSTOP)
    with compile_lock.lock_compilation("kernel", lambda: False):
        pass
    waiting, ended = (record.getMessage() for record in caplog.records)
    assert waiting.startswith("compiling kernels for this kind of CPU, once: ")
    assert ended.startswith("another process has been compiling kernel for ")


def test_an_error_gives_the_turn_to_the_next(shared: Path) -> None:
    with pytest.raises(ZeroDivisionError), compile_lock.lock_compilation("kernel", lambda: False):
        raise ZeroDivisionError
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        process.kill()


def test_a_file_system_without_locks_lets_each_compile(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    caplog.set_level("INFO", logger="commlib")
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with compile_lock.lock_compilation("kernel", lambda: False):
        pass
    (record,) = caplog.records
    assert "no locks on this node (No locks available)" in record.getMessage()


def test_locks_are_local_to_the_node(shared: Path) -> None:
    """On a network file system locks may hang, and all nodes would request them at once."""
    assert compile_lock.lock_file() is not None
    assert (shared.parents[1] / f"commlib-{os.geteuid()}" / "locks").exists()
    assert not (shared / "locks").exists()


def test_without_a_folder_there_is_no_wait(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lock, "folder", lambda: None)
    with compile_lock.lock_compilation("kernel", lambda: False):
        assert compile_lock.lock_file() is None


def test_long_compilations_are_reported_once(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_three() -> None:
        for name in ("a", "b", "c"):
            with compile_lock.lock_compilation(name, lambda: False):
                time.sleep(0.1)

    compile_three()
    assert not caplog.records  # the compilation was short
    monkeypatch.setattr(compile_lock, "SILENT", 0.05)
    compile_three()
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling kernels for this kind of CPU, once: ")
    assert str(shared) in record.getMessage()


def test_the_line_has_the_number_of_kernels_and_a_remedy(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (shared / "stored").touch()
    with compile_lock.lock_compilation("first", lambda: False):
        pass
    monkeypatch.setattr(compile_lock, "SILENT", 0.0)
    with compile_lock.lock_compilation("second", lambda: False):
        pass
    (record,) = caplog.records
    line = record.getMessage()
    assert f"CPU, once: 2 so far, 5 to 30 s in total (stored in {shared}, where 1 are); 'commlib warm' compiles" in line


def test_a_single_kernel_is_reported_too(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else compiles, so there is no wait, and no later kernel follows."""
    monkeypatch.setattr(compile_lock, "SILENT", 0.05)
    with compile_lock.lock_compilation("only", lambda: False):
        time.sleep(0.1)
    assert len(caplog.records) == 1


def test_kernels_within_a_kernel_count_once(shared: Path) -> None:
    with compile_lock.lock_compilation("outer", lambda: False), compile_lock.lock_compilation("inner", lambda: False):
        time.sleep(0.2)
    assert 0.2 <= compile_lock.delay().before < 0.4
