"""Launching: start a benchmark as a job, on this node or on emulated hosts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ci.hosts import Hosts, HostsError, find_mpiexec, launch_settings


def start_job(script: str, *, hosts: int, ranks_per_host: int, rate: str, timeout: float) -> int:
    """Run `script --worker` with this program's arguments on every rank; return the job's exit code.

    One host means this node; several hosts are emulated (root only), with links of `rate`.
    """
    name = os.path.basename(script)
    command = [sys.executable, os.path.abspath(script), "--worker", *sys.argv[1:]]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # gloo warns of host names that it cannot resolve
    try:
        if hosts == 1:
            command = [find_mpiexec(), "-n", str(ranks_per_host), *command]
            environment = {**launch_settings(ranks_per_host), **os.environ, **environment}
            return subprocess.run(command, env=environment, timeout=timeout).returncode
        with Hosts(hosts, rate) as created:
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            return created.run(command, ranks_per_host, timeout=timeout, env=environment).returncode
    except HostsError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except subprocess.TimeoutExpired:
        print(f"{name}: the job did not end within {timeout:g} s: see --timeout", file=sys.stderr)
    return 1


def run(script: str, options: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run `work` if this is a rank of the job, else start the job with these options; return the exit code."""
    for name in ("out", "plot"):
        if getattr(options, name, None):
            setattr(options, name, Path(os.path.abspath(getattr(options, name))))
    if options.worker:
        return work(options)
    job = {name: getattr(options, name) for name in ("hosts", "ranks_per_host", "rate", "timeout")}
    return start_job(script, **job)
