"""Hangs between hosts: diagnosed through the one folder that hosts share."""

from __future__ import annotations

import re
import sys

import pytest

from ci.hosts import Hosts
from commlib.observe.hang_folder import find_hangs

pytestmark = [pytest.mark.any_mpi, pytest.mark.long]

PROGRAM = """
import time
from pathlib import Path
import numpy as np
import commlib

comm = commlib.init()
x = np.ones(100, "float32")
comm.all_reduce(x)

def skip():
    while not list(Path(comm.config.hang_folder).glob("*/*/diagnosis.txt")):
        time.sleep(0.05)

if comm.rank == 3:
    skip()
comm.all_reduce(x)
commlib.shutdown()
print("well\\n", end="")
"""


def test_a_call_that_one_rank_has_not_made(tmp_path):
    """Two ranks on each host; ranks that wait for rank 3 in messages, or in parts of the call, report the call."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    settings = {"COMMLIB_HANG_AFTER": "2", "COMMLIB_HANG_FOLDER": str(tmp_path / "hangs")}
    with Hosts(2) as hosts:
        done = hosts.run([sys.executable, str(script)], 2, timeout=240, env=settings, capture=True)
    assert done.returncode == 0 and done.stdout.count("well") == 4, done.stdout + done.stderr
    (hang,) = find_hangs(tmp_path / "hangs")
    assert hang.ranks() == {0, 1, 2, 3}
    report = (hang.path / "diagnosis.txt").read_text()
    assert re.search(r"rank 3 is missing in world.*: all_reduce of 100 x float32.*; it is at .* in skip: ", report), (
        report
    )
    assert re.search(
        r"ranks? .*: waits in world: all_reduce of 100 x float32, .* \(call 2\)\n    at .*program", report
    ), report
    assert {dump.host for dump in hang.read()} == {"h0", "h1"}
    assert report.splitlines()[1] in done.stderr


ASKING = """
import os, subprocess, sys, time
from pathlib import Path
import numpy as np
import commlib

comm = commlib.init()
x = np.ones(100, "float32")
comm.all_reduce(x)
job = Path(comm.config.hang_folder) / f"job-{comm.runtime.token}"
elsewhere = "import socket; socket.gethostname = lambda: 'login'; from commlib.cli.app import app; app()"

def ask(*command):
    done = subprocess.run([sys.executable, *command, "--timeout", "40"], capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)

if comm.rank == 3:
    ask("-m", "commlib", "trace", "hang", "--now", comm.runtime.token)
    ask("-c", elsewhere, "trace", "hang", "--now", str(job))
comm.all_reduce(x)
commlib.shutdown()
print("well\\n", end="")
"""


def test_the_command_on_one_host_or_none_queries_ranks_on_all_hosts(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(ASKING)
    settings = {"COMMLIB_STALL_WARNING": "1", "COMMLIB_HANG_FOLDER": str(tmp_path / "hangs")}
    with Hosts(2) as hosts:
        done = hosts.run([sys.executable, str(script)], 2, timeout=240, env=settings, capture=True)
    assert done.returncode == 0 and done.stdout.count("well") == 4, done.stdout + done.stderr
    folders = sorted((tmp_path / "hangs").glob("job-*/now-*"))
    assert [path.name for path in folders] == ["now-1", "now-2"]
    assert all(len(list(path.glob("rank-*.json"))) == 4 for path in folders), done.stdout
    texts = re.findall(
        r"rank 3 is missing in world.*: all_reduce of 100 x float32.*; it is at .* in ask: ", done.stdout
    )
    assert len(texts) == 2, done.stdout + done.stderr
    assert re.search(rf"or at once: commlib trace hang --now {folders[0].parent}\n", done.stderr), done.stderr
