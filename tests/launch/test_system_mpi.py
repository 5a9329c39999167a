"""A system's MPI instead of a wheel's: Debian's Open MPI 4.1 and MPICH 4.0, in /usr as on a cluster.

commlib is installed where it cannot write. `ci/system_mpi` lays the packages over /usr.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest

import commlib

pytestmark = pytest.mark.any_mpi

ROOT = Path(__file__).parents[2]
MPIS = ["openmpi", "mpich"]


class Run(Protocol):
    def __call__(self, mpi: str, n: int, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has this one's packages, but no MPI library of its own."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=False)
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all packages, without bytecode."""
    folder = tmp_path_factory.mktemp("installed")
    for package in (ROOT / "commlib", ROOT / "adapters/commlib_torch"):
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def run(bare_python: Path, installed: Path, launch_environment: Mapping[str, str], tmp_path: Path) -> Run:
    """Run Python on `n` ranks of a system's MPI, with commlib in a read-only folder."""

    def run(mpi: str, n: int, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "ci/system_mpi"), mpi, "--read-only", str(installed), f"mpiexec.{mpi}", "-n", str(n)]
        environment = {name: value for name, value in launch_environment.items() if name != "LD_LIBRARY_PATH"}
        environment |= {"PYTHONPATH": f"{installed}:{ROOT}"}
        pipe = subprocess.PIPE
        arguments = (str(bare_python), *arguments)
        with subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment, stdin=-3, stdout=pipe, stderr=pipe, text=True
        ) as job:
            try:
                out, err = job.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                job.terminate()
                out, err = job.communicate()
                pytest.fail(f"{n} ranks did not end within {timeout} s\n{out}\n{err}")
        if job.returncode == 77:
            pytest.skip(err.strip().splitlines()[-1])
        return subprocess.CompletedProcess(command, job.returncode, out, err)

    return run


EVERY_VERB = """
import sys
from pathlib import Path
import numpy as np
import commlib
from tests.bodies.every_verb import calls

comm = commlib.init()
from mpi4py import MPI
assert Path(commlib.__file__).parents[1] == Path(sys.argv[1]), commlib
try:
    Path(sys.argv[1], "commlib", "new").touch()
except OSError as error:
    assert error.errno == 30, error  # read-only
else:
    raise AssertionError("this folder can be written to")

for verb, way, call in calls(comm):
    call()
rank, size = comm.rank, comm.size
for dtype in ("float32", "float16", "int64"):
    for count in (5, 70_000):
        x = (np.arange(count) % 7 + rank).astype(dtype)
        want = sum((np.arange(count) % 7 + other).astype(dtype) for other in range(size))
        for algorithm in ("auto", "native", "ring"):
            if (dtype, algorithm) != ("float16", "native"):
                assert (comm.all_reduce(x, algorithm=algorithm) == want).all(), (dtype, count, algorithm)
        gathered = comm.all_gather(x).reshape(size, -1)
        assert all((gathered[other] == x - rank + other).all() for other in range(size))
        assert (comm.broadcast(x.copy(), root=size - 1) == x - rank + size - 1).all()
    sent = np.full(size, rank, dtype)
    assert comm.all_to_all(sent).tolist() == list(range(size))
comm.send_recv(np.full(9, rank), (rank + 1) % size, got := np.empty(9, np.int64), (rank - 1) % size)
assert (got == (rank - 1) % size).all()
y = comm.empty(100)
y[:] = rank
assert (comm.all_reduce(y, "max", out=y) == size - 1).all()
print("right under", MPI.get_vendor(), flush=True)
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_each_verb(run: Run, installed: Path, mpi: str) -> None:
    done = run(mpi, 3, "-c", EVERY_VERB, str(installed))
    assert done.returncode == 0, done.stderr
    vendor = {"openmpi": "('Open MPI', (4, 1, ", "mpich": "('MPICH', (4, 0, "}[mpi]
    assert done.stdout.count(f"right under {vendor}") == 3, done.stdout
    assert not list(installed.rglob("__pycache__"))


@pytest.mark.parametrize(
    "setting",
    [
        "",
        pytest.param("MPI4PY_MPIABI=mpich", marks=pytest.mark.long),
        "MPI4PY_LIBMPI=/usr/lib/x86_64-linux-gnu/libmpich.so.12",
    ],
)
def test_debians_mpich_is_found_on_request(run: Run, setting: str) -> None:
    """With Open MPI installed as well, one must request it, and that was an error: no file is called libmpi.so.12."""
    program = f"""
import os
setting = {setting!r}
os.environ.update([setting.split("=")] if setting else [])
import commlib
commlib.init()
from mpi4py import MPI
print(MPI.get_vendor()[0], os.environ.get("MPI4PY_MPIABI"))
"""
    done = run("mpich", 1, "-c", program)
    assert (done.returncode, done.stdout) == (0, f"MPICH {'mpich' if 'ABI' in setting else None}\n"), done.stderr


DIES = """
import os, signal, sys, time
import numpy as np
import commlib

comm = commlib.init()
x = np.ones(5000)
comm.all_reduce(x)
if comm.rank == 1:
    sys.stderr.write(f"event at {time.time()}\\n")
    sys.stderr.flush()
    if sys.argv[1] == "raises":
        raise ValueError("out of luck")
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_reduce(x) if sys.argv[2] == "node" else comm.recv(x, 1)
"""


@pytest.mark.parametrize(
    ("mpi", "how", "where"),
    [
        pytest.param("openmpi", "raises", "node", marks=pytest.mark.long),
        ("mpich", "raises", "node"),
        pytest.param("openmpi", "is killed", "recv", marks=pytest.mark.long),
        pytest.param("mpich", "is killed", "recv", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_ends_the_job(run: Run, mpi: str, how: str, where: str) -> None:
    done = run(mpi, 3, "-c", DIES, how, where)
    end_time = time.time()
    assert done.returncode != 0
    assert end_time - float(done.stderr.partition("event at ")[2].split()[0]) < 10
    if how == "raises":
        assert "rank 1 of 3 on" in done.stderr and "ended by an uncaught ValueError; aborting the job" in done.stderr


@pytest.mark.long  # two more starts of PyTorch
@pytest.mark.parametrize("mpi", MPIS)
def test_a_training(run: Run, mpi: str) -> None:
    done = run(mpi, 2, str(ROOT / "examples/cluster/requeue_torch.py"), "--steps", "10", timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("weights ") == 1, done.stdout


# mpi4py does not find Debian's MPICH by itself: see commlib/launch/mpi_start.py.
PYTEST = (
    "import sys; from commlib.launch import mpi_start; mpi_start.load_mpi()\n"
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.mark.parametrize("name", ["verbs", "native", "messages", "groups"])
@pytest.mark.parametrize("mpi", MPIS)
def test_the_tests_of(run: Run, mpi: str, name: str) -> None:
    options = ["-q", "-x", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "tests.plugins.moving"]
    done = run(mpi, 2, "-c", PYTEST, *options, str(ROOT / f"tests/mpi/test_{name}.py"), timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_commlib_is_the_checkouts() -> None:
    """The copies above are of the code under test."""
    assert Path(commlib.__file__).parents[1] == ROOT
