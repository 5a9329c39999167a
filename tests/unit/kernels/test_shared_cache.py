"""Hosts that share a cache folder over a network compile into it at once: no file is ever incomplete.

They share no lock. Here each simulated host has its own folder of locks: a TMPDIR of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOSTS = 3

# Writes every kernel again and again, whole or cut off by a kill, while others read.
WRITER = """
import os, sys
from commlib.kernels import cache
print(cache.folder(), flush=True)
payload = os.urandom(16) * 20_000
while True:
    for name in ("a", "b"):
        cache.write(name, name.encode() + payload)
"""

READER = """
import sys
from commlib.kernels import cache
found = 0
while found < 400:
    for name in ("a", "b"):
        data = cache.read(name)
        if data is not None:
            assert data[:1] == name.encode() and len(data) == 320_001 and data[1:17] * 20_000 == data[1:]
            found += 1
print("read", found)
"""

COMPILES = """
import sys
import numpy as np
from commlib.execution.reduce_function import ReduceFunction
x = np.full(100, 2, "int32")
ReduceFunction("int32", "sum").combine([x, x], x)
assert (x == 4).all()
"""


def host(number: int, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a host."""
    (tmp_path / f"tmp-{number}").mkdir(exist_ok=True, mode=0o700)
    (tmp_path / "home").mkdir(exist_ok=True, mode=0o700)
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "NUMBA_CACHE_DIR": "",
        "TMPDIR": str(tmp_path / f"tmp-{number}"),
    }


def start(program: str, number: int, tmp_path: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", program], env=host(number, tmp_path), stdout=pipe, stderr=pipe, text=True
    )


def test_files_are_complete_while_hosts_write_and_are_killed(tmp_path: Path) -> None:
    writers = [start(WRITER, number, tmp_path) for number in range(HOSTS)]
    folders = set()
    for writer in writers:
        assert writer.stdout is not None
        folders.add(writer.stdout.readline().strip())
    assert len(folders) == 1
    reader = start(READER, HOSTS, tmp_path)
    deadline = time.monotonic() + 60
    while reader.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        writers.pop(0).send_signal(signal.SIGKILL)
        writers.append(start(WRITER, 0, tmp_path))
    out, err = reader.communicate(timeout=30)
    for writer in writers:
        writer.kill()
        writer.communicate()
    assert (reader.returncode, err) == (0, ""), err  # no file was damaged: damage would be reported
    assert out.startswith("read ")
    remaining = {path.name for path in Path(folders.pop()).iterdir() if not path.name.endswith(".new")}
    assert remaining == {"a", "b", "in-use"}  # partial files have names of their own, and are removed after a day


def test_hosts_can_compile_a_kernel_at_once(tmp_path: Path) -> None:
    started = [start(COMPILES, number, tmp_path) for number in range(HOSTS)]
    killed = start(COMPILES, 0, tmp_path)
    time.sleep(1.5)
    killed.kill()
    killed.communicate()
    for process in started:
        assert process.wait(120) == 0, process.communicate()[1]
    again = start(COMPILES, HOSTS, tmp_path)
    assert again.communicate(timeout=60) == ("", "")
