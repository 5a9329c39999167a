"""The Slurm of these tests: it is complete, and leaves nothing behind, however the process that created it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import slurm as tool
from ci.hosts import Hosts
from ci.slurm import Slurm

pytestmark = pytest.mark.any_mpi

JOB = "sleep\000987654"  # as in /proc

KILLED = """\
import sys, time
from ci.hosts import Hosts
from ci.slurm import Slurm

with Hosts(1) as hosts, Slurm(hosts) as slurm:
    print(slurm.run(["sbatch", "--output=/dev/null", "--wrap", "sleep 987654"], timeout=30).stdout, end="", flush=True)
    time.sleep(60)
"""


def running(name: str) -> list[int]:
    """Return the processes whose command line contains a text."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_text()
            except OSError:
                continue
            if name in line:
                pids.append(int(entry.name))
    return pids


def test_several_nodes_on_one_host(tmp_path: Path) -> None:
    with Hosts(1) as hosts, Slurm(hosts, nodes_per_host=3, cores=2) as slurm:
        done = slurm.run(["srun", "-N3", "--ntasks-per-node=2", "sh", "-c", "echo $SLURMD_NODENAME"], timeout=30)
        folder = Path(slurm.run(["sh", "-c", "dirname $SLURM_CONF"], timeout=30).stdout.strip())
        assert folder.is_dir()
    assert sorted(done.stdout.split()) == ["h0n0", "h0n0", "h0n1", "h0n1", "h0n2", "h0n2"], done.stderr
    assert not folder.exists()


def test_it_ends_with_its_creator() -> None:
    """Killed, the creator cannot stop the daemons; and their jobs would run on unnoticed."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "Submitted batch job 1\n"
            until(lambda: running(f"slurm-{parent.pid}-") and running(JOB))
        finally:
            parent.send_signal(signal.SIGKILL)
    until(lambda: not running(f"slurm-{parent.pid}-") and not running(JOB))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ci.hosts.SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.missing() == f"{', '.join(tool.TOOLS)} not installed (apt install slurm-wlm)"
    monkeypatch.setattr(tool, "PMIX", str(tmp_path / "*"))
    assert tool.missing_pmix() == f"there is no {tmp_path}/* (apt install libpmix-dev)"


def test_a_custom_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ci.slurm", "2", "--", "srun", "-N2", "hostname"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.split()) == ["h0", "h1"], done.stderr


def test_a_daemon_that_fails_to_start_is_reported_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "SECONDS", 2.0)
    monkeypatch.setattr(tool, "CONFIGURATION", tool.CONFIGURATION + "SelectType=select/none_such\n")
    with Hosts(1) as hosts, pytest.raises(tool.SlurmError, match=r"(?s)slurmctld.*none_such"), Slurm(hosts):
        pass
