"""The probe in a process of its own: any outcome of the process is an answer."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from commlib.process.probe_process import strip_launcher
from commlib.transport.cuda_probe import ProbeResult, probe

SAY = "def say(text): print('commlib.transport.cuda_probe: ' + __import__('json').dumps(text), flush=True)\n"


def run_probe(program: str, seconds: float = 20.0) -> ProbeResult:
    return probe((sys.executable, "-c", SAY + program), seconds)


def test_a_probe_with_all_bytes_succeeds():
    assert run_probe("print('noise'); say('MPI X: yes'); say('')") == ProbeResult("MPI X: yes", "")


def test_wrong_bytes_are_a_failure():
    assert (
        run_probe("say('MPI X: yes'); say('3 of 64 bytes arrived corrupted')").failure
        == "3 of 64 bytes arrived corrupted"
    )


def test_a_dead_process_is_a_failure():
    result = run_probe("say('MPI X: yes'); import ctypes; ctypes.string_at(1)")
    assert result == ProbeResult("MPI X: yes", "the probe process was killed by SIGSEGV")


def test_an_early_exit_is_a_failure():
    result = run_probe("import sys; print('no device\\n', file=sys.stderr); sys.exit(3)")
    assert result == ProbeResult("", "the probe process ended with code 3: no device")
    assert run_probe("").failure.endswith("ended with code 0: it printed nothing")  # no evidence


def test_a_hanging_probe_is_ended(tmp_path: Path):
    """The probe and its children are ended."""
    file = tmp_path / "children"
    program = f"""
import os, time
child = os.fork()
if child:
    open({str(file)!r}, "w").write(f"{{os.getpid()}} {{child}}")
    say("MPI X: yes")
time.sleep(60)
"""
    started = time.monotonic()
    assert run_probe(program, 2.0) == ProbeResult("MPI X: yes", "the probe did not end within 2 s")
    assert time.monotonic() - started < 20
    for process in file.read_text().split():
        status = Path("/proc", process, "stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() - started < 20
            time.sleep(0.01)


def test_a_process_that_cannot_start_is_a_failure():
    assert probe(("/no/such/program",)).failure.startswith("the probe process could not be started: ")


def test_the_probe_does_not_join_the_job():
    """It must not act as a rank of the job; but the user's MPI settings apply."""
    launched = {
        "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_FD": "7", "SLURM_PROCID": "1", "PRTE_LAUNCHED": "1",
        "OMPI_MCA_orte_hnp_uri": "x", "OMPI_MCA_ess_base_vpid": "1", "MPI_LOCALRANKID": "1", "PALS_RANKID": "1",
    }  # fmt: skip
    user_settings = {
        "OMPI_MCA_pml": "ucx",
        "UCX_TLS": "cuda",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
        "CUDA_VISIBLE_DEVICES": "2",
    }
    stripped = strip_launcher({**launched, **user_settings})
    assert not launched.keys() & stripped.keys() and user_settings.items() <= stripped.items()
    assert stripped["PYTHONPATH"].split(os.pathsep) == [path for path in sys.path if path]
