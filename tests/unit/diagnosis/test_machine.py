"""Facts of a machine, read from synthetic files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commlib.diagnosis.load import find_busy, is_busy, read_load
from commlib.diagnosis.machine import LIMITS, read_host, read_limits
from commlib.diagnosis.process import control_variables, read_rank

FILES = {
    "proc/meminfo": "MemTotal:       16384000 kB\nMemFree: 1 kB\n",
    "proc/sys/kernel/yama/ptrace_scope": "1\n",
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "25000",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/net/virtual/operstate": "up",
    "sys/class/net/virtual/speed": "-1",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H100\nIRQ: 1\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_facts_of_the_system_are_read(tmp_path):
    write(tmp_path, FILES)
    host = read_host(tmp_path)
    assert (host.memory, host.yama, host.gpus) == (16384000 << 10, 1, ("NVIDIA H100",))
    assert host.links == {"eth0": "25 Gbit/s", "virtual": "up"}
    assert host.fabrics == {"mlx5_0:1": "200 Gb/sec (4X HDR)"}
    assert host.shared_memory is None and host.memory_limit is None


def test_an_empty_machine_has_no_facts(tmp_path):
    host = read_host(tmp_path)
    assert host.memory is None and host.yama is None and not host.links and not host.fabrics and not host.gpus


@pytest.mark.parametrize(
    "files, expected",
    [
        # version 2: the least limit on the way counts
        (
            {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "4096",
             "sys/fs/cgroup/job/memory.current": "1024", "sys/fs/cgroup/job/step/memory.max": "max"},
            (4096, 1024),
        ),
        # the group's own folder is what is mounted
        (
            {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": "8192",
             "sys/fs/cgroup/memory.current": "10"},
            (8192, 10),
        ),
        # version 1
        (
            {"proc/self/cgroup": "9:cpu:/x\n4:memory:/job\n0::/\n",
             "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2048",
             "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "7",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)},
            (2048, 7),
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"}, (None, None)),
    ],
)  # fmt: skip
def test_control_groups_limit_cores_and_memory(tmp_path, files, expected):
    write(tmp_path, files)
    host = read_host(tmp_path)
    assert (host.memory_limit, host.memory_used) == expected


def test_limits_are_read():
    assert set(read_limits()) == set(LIMITS) and all(isinstance(value, int) for value in read_limits().values())


def test_relevant_variables_are_recorded():
    recorded = {"OMPI_MCA_pml": "ob1", "UCX_TLS": "tcp", "OMP_NUM_THREADS": "1", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}
    noise = {"OMPI_MCA_ess_base_jobid": "1", "OMPI_COMM_WORLD_RANK": "0", "HOME": "/", "OMPI_MCA_PREFIXES": "x"}
    assert control_variables(recorded | noise) == recorded


def test_facts_of_this_process_are_read(monkeypatch):
    monkeypatch.setenv("COMMLIB_CONFIG", "none")
    facts = read_rank({"COMMLIB_SPINS": "3", "COMMLIB_CONFIG": "none", "PMI_RANK": "2", "PMI_SIZE": "4"})
    assert (facts.rank, facts.settings, facts.origins) == (2, {"COMMLIB_SPINS": "3"}, {"COMMLIB_SPINS": "environment"})
    assert facts.packages["numpy"] and facts.cores and facts.start is not None and facts.start.size == 4
    wrong = read_rank({"COMMLIB_SPINS": "many"})
    assert "COMMLIB_SPINS='many'" in wrong.wrong_settings and wrong.start is None


def stat(name: str, parent: int, ticks: int) -> str:
    return f"1 ({name}) R {parent} 1 1 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 1"


def test_the_load_and_its_processes_are_read(tmp_path, monkeypatch):
    def grow(seconds):
        write(tmp_path, {"proc/12/stat": stat("a b) c", 1, 1000), f"proc/{os.getpid()}/stat": stat("me", 1, 1000)})

    write(tmp_path, {"proc/loadavg": "3.25 1.00 0.50 4/321 999\n", "proc/11/stat": stat("idle", 1, 5)})
    write(tmp_path, {"proc/12/stat": stat("a b) c", 1, 5), f"proc/{os.getpid()}/stat": stat("me", 1, 5)})
    monkeypatch.setattr(time, "sleep", grow)
    assert read_load(tmp_path) == 3.25
    (text,) = find_busy(tmp_path)
    assert text.startswith("a b) c (process 12, ") and text.endswith("% of a core)")


def test_a_load_above_the_cores_is_busy():
    assert [is_busy(load, 8) for load in (None, 0.3, 2.0, 2.1, 8.0)] == [False, False, False, True, True]
    assert not is_busy(0.6, 1) and is_busy(0.8, 1)
