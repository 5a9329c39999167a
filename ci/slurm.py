"""A separate Slurm on emulated hosts: one node on each, or several.

    python -m ci.slurm 2 -- srun -N 2 hostname
    with Hosts(2) as hosts, Slurm(hosts) as slurm: slurm.run(["srun", "-N", "2", "hostname"], timeout=30)

The controller runs on h0, which is also the login node. It needs no munge, cgroups, systemd or database, and changes
nothing in /etc: its configuration, state and logs are in a folder that is removed at its end. Hosts have separate
networks, so its ports are free. All its processes, jobs included, are in the hosts' PID namespace and end with it,
however the process that created the hosts ends. If a host has several nodes, their names differ from the host name, and
srun --mpi=pmix fails, because PMIx compares the names. Needs the requirements of ci/hosts.py, and Debian's slurm-wlm.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ci.hosts import Hosts, HostsError, tool_path
from ci.hosts import missing_rights as missing_rights_for_hosts

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"  # the path that Slurm's plugin opens; only in the package libpmix-dev
FIRST_PORT = 17000  # of the nodes' daemons
SECONDS = 20.0  # until all nodes are idle

# Timers are short: by default a job waits two minutes after a requeue (cred_expire, at least 5 s), and has half a
# minute from SIGTERM to SIGKILL (KillWait). Ranks on a busy machine need some seconds for their final messages.
CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={controller}
SlurmctldPort=16817
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
ReturnToService=2
KillWait=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={host} Port={port} CPUs={cores} State=UNKNOWN"


class SlurmError(RuntimeError):
    """Slurm did not start."""


class Slurm:
    """A Slurm on these hosts, for the duration of a `with` block; see this module's docstring.

    nodes_per_host: with 1, each node has the name of its host. cores: per node, independent of the machine.
    Raises SlurmError with the daemons' logs if not all nodes are idle after 20 s, ValueError for bad numbers.
    """

    def __init__(self, hosts: Hosts, nodes_per_host: int = 1, cores: int = 4) -> None:
        if nodes_per_host < 1 or cores < 1:
            raise ValueError(f"{nodes_per_host} nodes per host with {cores} cores each, expected at least 1")
        several = nodes_per_host > 1
        self._hosts = hosts
        self._cores = cores
        self._folder: Path | None = None
        self._is_up = False
        self.nodes = {
            f"{host}n{number}" if several else host: host for host in hosts.names for number in range(nodes_per_host)
        }
        """The host of each node."""

    def __enter__(self) -> Slurm:
        self._folder = Path(tempfile.mkdtemp(prefix=f"slurm-{os.getpid()}-"))
        try:
            self._start(self._folder)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all jobs, stop the daemons and remove the folder. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        with contextlib.suppress(HostsError):  # HostsError: the hosts have ended, and Slurm with them
            if self._is_up:
                self._run_on_controller(
                    folder, 'scancel --user=root; until [ -z "$(squeue --noheader)" ]; do sleep 0.05; done'
                )
            if pids := [text for file in folder.glob("*.pid") if (text := file.read_text().strip())]:
                # These are PIDs of the hosts' namespace.
                self._run_on_controller(folder, f"kill -KILL {' '.join(pids)}")
        self._is_up = False
        shutil.rmtree(folder, ignore_errors=True)

    def command(self, arguments: Sequence[str], host: str = "h0") -> list[str]:
        """Return the command that runs `arguments` on a host, in this working directory, with this Slurm."""
        if self._folder is None:
            raise SlurmError("this Slurm does not run: use it inside its `with` block")
        return self._command(self._folder, arguments, host)

    def _command(self, folder: Path, arguments: Sequence[str], host: str) -> list[str]:
        return self._hosts.command(["env", f"SLURM_CONF={folder}/slurm.conf", *arguments], host)

    def run(
        self, command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on h0, with its output and errors as text. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            self.command(command),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def _start(self, folder: Path) -> None:
        lines = (
            NODE.format(name=name, host=host, port=FIRST_PORT + number, cores=self._cores)
            for number, (name, host) in enumerate(self.nodes.items())
        )
        controller = self._hosts.names[0]
        text = CONFIGURATION.format(controller=controller, folder=folder, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(text.lstrip())
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for name in self.nodes:
            (folder / f"tmp.{name}").mkdir()  # per node: PMIx creates a folder of the same name in it on each node
        self._daemon(["slurmctld"], controller)
        for host in self._hosts.names:
            # slurmd does not start without mounted cgroups, although it is configured to use none.
            self._daemon(["mount", "-t", "tmpfs", "cgroup", "/sys/fs/cgroup"], host)
        for name, host in self.nodes.items():
            self._daemon(["slurmd", "-N", name], host)
        deadline = time.monotonic() + SECONDS
        while self._idle() < len(self.nodes):
            if time.monotonic() > deadline:
                raise SlurmError(f"after {SECONDS:g} s {self._idle()} of {len(self.nodes)} nodes are idle{self.logs()}")
            time.sleep(0.05)
        self._is_up = True

    def _daemon(self, arguments: Sequence[str], host: str) -> None:
        """Run a command that goes to the background, or ends at once."""
        done = subprocess.run(
            self.command(arguments, host),
            env={**os.environ, "PATH": tool_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode != 0:
            raise SlurmError(f"{' '.join(arguments)} failed on {host}: {done.stderr.strip()}{self.logs()}")

    def _idle(self) -> int:
        done = self.run(["timeout", "5", "sinfo", "--noheader", "--Node", "--format=%t"], timeout=10)
        return done.stdout.split().count("idle")

    def logs(self) -> str:
        """Return the end of each daemon's log."""
        assert self._folder is not None
        ends = (f"\n--- {log.name}:\n{log.read_text()[-1500:]}" for log in sorted(self._folder.glob("*.log")))
        return "".join(ends)

    def _run_on_controller(self, folder: Path, text: str) -> None:
        """Run a shell command for at most 10 s, and ignore its result."""
        command = self._command(folder, ["timeout", "10", "sh", "-c", text], "h0")
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def missing() -> str | None:
    """Return the reason why Slurm cannot run on this machine, or None if it can."""
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=tool_path()) is None]:
        return f"{', '.join(absent)} not installed (apt install slurm-wlm)"
    return missing_rights_for_hosts()


def missing_pmix() -> str | None:
    """Return the reason why `srun --mpi=pmix` cannot be used, or None if it can."""
    return None if glob.glob(PMIX) else f"there is no {PMIX} (apt install libpmix-dev)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on the first host of a separate Slurm.")
    parser.add_argument("hosts", type=int)
    parser.add_argument("--nodes-per-host", type=int, default=1)
    parser.add_argument("--cores", type=int, default=4, help="of each node (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Hosts(options.hosts) as hosts, Slurm(hosts, options.nodes_per_host, options.cores) as slurm:
            return subprocess.run(slurm.command(options.command)).returncode
    except (ValueError, HostsError, SlurmError) as error:
        print(f"slurm.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
