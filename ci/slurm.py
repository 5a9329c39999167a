"""A Slurm of its own on emulated hosts: one node on each, or several.

    python -m ci.slurm 2 -- srun -N 2 hostname
    with Hosts(2) as hosts, Slurm(hosts) as slurm: slurm.run(["srun", "-N", "2", "hostname"], timeout=30)

The controller runs on h0, where users log in, too. It needs no munge, cgroups, systemd or database, and touches nothing
in /etc: its configuration, state and logs are in a folder that goes when it does. Hosts have networks of their own, so
its ports are nobody else's; and all of it is in the hosts' namespace of processes, jobs included, so that it ends with
them, however the process that made them ends. Where a host has several nodes, Slurm names them otherwise than the host:
srun --mpi=pmix is wrong then, for PMIx compares the names. Needs what ci/hosts.py needs, and slurm-wlm of Debian.
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
PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"  # where Slurm's plugin looks for it; in the package libpmix-dev alone
FIRST_PORT = 17000  # of the nodes' daemons
SECONDS = 20.0  # until all nodes are there

# Timers are short: elsewhere a job waits for two minutes after a requeue (cred_expire, 5 s at least), and has half a
# minute from SIGTERM to SIGKILL (KillWait): ranks of a busy machine need some seconds to say their last words.
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
    """A Slurm on these hosts, from `with` to its end; see this module's docstring.

    nodes_per_host: 1 has each node named as its host. cores: of a node, whatever the machine has.
    Raises SlurmError with the daemons' logs if not all nodes are there after 20 s, ValueError for bad numbers.
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
        with contextlib.suppress(HostsError):  # else the hosts are gone, and all of it with them
            if self._is_up:
                self._ask(folder, 'scancel --user=root; until [ -z "$(squeue --noheader)" ]; do sleep 0.05; done')
            if pids := [text for file in folder.glob("*.pid") if (text := file.read_text().strip())]:
                self._ask(folder, f"kill -KILL {' '.join(pids)}")  # numbers in the hosts' namespace, which is theirs
        self._is_up = False
        shutil.rmtree(folder, ignore_errors=True)

    def command(self, arguments: Sequence[str], host: str = "h0") -> list[str]:
        """Return the command that runs `arguments` on a host, in this working directory, with this Slurm."""
        if self._folder is None:
            raise SlurmError("this Slurm is not there: make it by `with`")
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
            (folder / f"tmp.{name}").mkdir()  # of each node: PMIx has a folder of the same name there on all of them
        self._daemon(["slurmctld"], controller)
        for host in self._hosts.names:
            # slurmd will not start where no cgroups are mounted, though it is told to use none.
            self._daemon(["mount", "-t", "tmpfs", "cgroup", "/sys/fs/cgroup"], host)
        for name, host in self.nodes.items():
            self._daemon(["slurmd", "-N", name], host)
        deadline = time.monotonic() + SECONDS
        while self._idle() < len(self.nodes):
            if time.monotonic() > deadline:
                raise SlurmError(
                    f"after {SECONDS:g} s {self._idle()} of {len(self.nodes)} nodes are there{self.logs()}"
                )
            time.sleep(0.05)
        self._is_up = True

    def _daemon(self, arguments: Sequence[str], host: str) -> None:
        """Run what goes on in the background, or is done at once."""
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
        """Return the end of what each daemon has logged."""
        assert self._folder is not None
        ends = (f"\n--- {log.name}:\n{log.read_text()[-1500:]}" for log in sorted(self._folder.glob("*.log")))
        return "".join(ends)

    def _ask(self, folder: Path, text: str) -> None:
        """Run a line of a shell, for some seconds at most, whatever comes of it."""
        command = self._command(folder, ["timeout", "10", "sh", "-c", text], "h0")
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def missing() -> str | None:
    """Return why there can be no Slurm here, or None if there can."""
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=tool_path()) is None]:
        return f"{', '.join(absent)} not installed here (apt install slurm-wlm)"
    return missing_rights_for_hosts()


def missing_pmix() -> str | None:
    """Return why `srun --mpi=pmix` cannot be here, or None if it can."""
    return None if glob.glob(PMIX) else f"there is no {PMIX} (apt install libpmix-dev)"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on the first host of a Slurm of its own.")
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
