"""Clean-up of emulated hosts: nothing is left behind, however the script ends; and two scripts do not collide."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from ci import hosts as module
from ci.hosts import Hosts, HostsError

SCRIPT = [sys.executable, module.__file__]
READY = "import time; print('running', flush=True); time.sleep({})"


def marked(mark):
    """Return the processes that inherited an environment with this mark: all that the script started, anywhere."""
    command_lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command_lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:  # it has ended
            pass
    return command_lines


class World:
    """Namespaces in which nothing else makes mounts, links or shared memory: a script that starts there must leave them
    unchanged.
    """

    def __init__(self, folder):
        self.folder = folder
        program = (
            "mkdir -p /run/netns; for at in /run/netns /dev/shm; do mount -t tmpfs world $at; done; echo ready; cat"
        )
        command = ["unshare", "--mount", "--net", "sh", "-ec", program]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def inside(self, command):
        return ["nsenter", f"--target={self.process.pid}", "--mount", "--net", "env", "-C", os.getcwd(), *command]

    def look(self):
        """Return what could be left behind besides processes: namespaces, links, mounts, files."""
        command = self.inside(["sh", "-c", "ip netns list; ip -brief link; cat /proc/self/mountinfo; ls -A /dev/shm"])
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return listing, sorted(self.folder.iterdir())

    @contextmanager
    def script(self, *arguments):
        """Start the script; yield it once its job runs, and a mark that all its processes carry."""
        mark = uuid.uuid4().hex
        environment = {**os.environ, "MARK": mark, "TMPDIR": str(self.folder)}
        with subprocess.Popen(
            self.inside([*SCRIPT, "2", "--rate", "1gbit", *arguments]),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == "running\n"
                assert len(marked(mark)) >= 6  # itself, the hub, one process per host, mpiexec, ranks
                yield process, mark
            finally:
                process.kill()


@pytest.fixture
def world(tmp_path):
    """A World that must be the same at the end as at the start."""
    it = World(tmp_path)
    try:
        before = it.look()
        yield it
        assert it.look() == before
    finally:
        it.process.communicate()


def test_leftovers_are_detected(tmp_path):
    it = World(tmp_path)
    try:
        looks = [it.look()]
        for command in (
            "ip netns add left",
            "ip link add left0 type veth",
            "touch /dev/shm/left",
            f"touch {tmp_path}/left",
        ):
            subprocess.run(it.inside(command.split()), check=True)
            looks.append(it.look())
        assert len(set(map(str, looks))) == 5
    finally:
        it.process.communicate()


def assert_processes_end(mark):
    deadline = time.monotonic() + 5
    while (remaining := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert remaining == []


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_to_the_script(world, number, code):
    with world.script("--", sys.executable, "-c", READY.format(60)) as (it, mark):
        it.send_signal(number)
        assert it.wait(10) == code
        assert_processes_end(mark)


def test_a_job_that_fails(world):
    with world.script("--", sys.executable, "-c", READY.format(1) + "; raise SystemExit(3)") as (it, mark):
        assert it.wait(30) not in (0, 124)
        assert_processes_end(mark)


@pytest.mark.any_mpi
def test_a_hanging_job_that_ignores_signals_in_its_own_session(world):
    program = "import os, signal; signal.signal(15, signal.SIG_IGN); os.fork() or os.setsid(); " + READY.format(60)
    with world.script("--timeout", "5", "--", sys.executable, "-c", program) as (it, mark):
        assert it.wait(20) == 124
        assert_processes_end(mark)
        assert "did not end within 5 s" in it.stderr.read()


def test_hosts_that_cannot_be_created(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "HOST", "echo no luck >&2; exit 1")
    with pytest.raises(HostsError, match="cannot make hosts: no luck"), Hosts(2):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_timed_out_job_takes_the_hosts_down(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Hosts(2) as hosts:
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            hosts.run([sys.executable, "-c", READY.format(60)], timeout=5, capture=True)
        assert caught.value.output.count("running") == 2
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(HostsError, match="these hosts do not exist"):
            hosts.run(["true"], timeout=5)


def test_several_jobs_on_the_same_hosts_and_on_others_with_the_same_names():
    program = "import socket; open('/dev/shm/mine', 'x'); print(socket.gethostname())"
    with Hosts(2) as some, Hosts(2) as others:
        for hosts in (some, others):
            done = hosts.run([sys.executable, "-c", program], timeout=240, capture=True)
            assert done.returncode == 0, done.stderr
            assert sorted(done.stdout.split()) == ["h0", "h1"]
        repeated = some.run([sys.executable, "-c", program], timeout=240, capture=True)
        assert repeated.returncode != 0 and "FileExistsError" in repeated.stderr  # a host remembers


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["0", "--", "true"], "0 hosts, expected 1 to 250"),
        (["2", "--rate", "fast", "--", "true"], "rate 'fast', expected a number and kbit, mbit or gbit"),
        (["2", "--ranks-per-host", "1,2,3", "--", "true"], r"ranks per host are [1, 2, 3], expected one number"),
    ],
)
def test_bad_arguments(arguments, message):
    done = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in done.stderr
