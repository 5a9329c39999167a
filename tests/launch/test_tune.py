"""`commlib tune` as a job of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from commlib import folders
from commlib.cost.records import Entry, MeasuredTime
from commlib.cost.table import Table
from tests.launch.conftest import MpiRun

pytestmark = pytest.mark.any_mpi

COMMAND = ["-c", "from commlib.cli import main; main()"]

# For jobs with another cache folder: compiling is not tested here.
KERNELS = {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR") or str(folders.user_cache().parent)}


def test_tune_writes_a_table_that_init_and_show_read(mpirun: MpiRun, tmp_path: Path) -> None:
    """The file need not exist when COMMLIB_TUNING_FILE names it."""
    file = tmp_path / "folder" / "tuning.json"
    named = {"COMMLIB_TUNING_FILE": str(file)}
    done = mpirun(2, [*COMMAND, "tune", "--seconds", "0.2"], env=named, timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"written to {file}" in done.stdout
    for word in ("alpha", "combining", "among the 2 ranks of a node", "all_to_all", "predicted"):
        assert word in done.stdout
    assert {(entry.nodes, entry.ranks_per_node) for entry in Table.load(file).entries} == {(1, 2)}

    done = mpirun(2, "import commlib; commlib.init()", env=named)
    assert done.returncode == 0, done.stderr
    show = [sys.executable, *COMMAND, "show", "all_reduce", "--predict", "--tuning", str(file), "--json"]
    shown = subprocess.run(show, capture_output=True, text=True, check=True)
    (machine,) = Table.load(file).machines
    assert json.loads(shown.stdout)["machine"]["gamma"] == machine.gamma


@pytest.mark.long
def test_tune_adds_to_an_existing_file(mpirun: MpiRun, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    elsewhere = Entry("all_reduce", 4, 8, "Some MPI 1.0", "any", (MeasuredTime(1024, "ring", 0, 1e-5),))
    Table((elsewhere,)).save(file)
    done = mpirun(3, [*COMMAND, "tune", "--seconds", "0.2", "--out", str(file)], timeout=90)
    assert done.returncode == 0, done.stderr
    entries = Table.load(file).entries
    assert elsewhere in entries
    assert {(entry.nodes, entry.ranks_per_node) for entry in entries} == {(4, 8), (1, 3)}


def test_tune_measures_the_paths_of_arrays_on_gpus(mpirun: MpiRun, tmp_path: Path) -> None:
    """They are added to the host's entries in a file; a call follows them."""
    file = tmp_path / "tuning.json"
    of_host = Entry("all_reduce", 1, 2, "Some MPI 1.0", "any", (MeasuredTime(1024, "ring", 0, 1e-5),))
    Table((of_host,)).save(file)
    program = "from tests.cuda.gpu import gpu; gpu(); from commlib.cli import main; main()"
    words = ["tune", "--device", "cuda", "--seconds", "0.1", "--out", str(file)]
    done = mpirun(2, ["-c", program, *words], timeout=90, env=KERNELS)
    assert done.returncode == 0, done.stderr
    assert "arrays on cuda, among the 2 ranks of a node" in done.stdout
    entries = Table.load(file).entries
    assert of_host in entries
    assert {entry.device for entry in entries} == {"", "cuda"}
    assert {time.algorithm for entry in entries for time in entry.times if entry.device} >= {"node", "host"}


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
def test_tune_names_the_ranks_without_a_gpu(mpirun: MpiRun) -> None:
    done = mpirun(2, [*COMMAND, "tune", "--device", "cuda"])
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.count("commlib tune: ranks 0-1: arrays on a GPU need CuPy") == 1, done.stderr


@pytest.mark.long
def test_tune_reports_mistakes_before_measuring(mpirun: MpiRun, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for arguments, message in (
        (["--out", str(broken)], "cannot read the tuning table"),
        (["--out", str(broken / "below.json")], "is not a writable folder"),
    ):
        done = mpirun(2, [*COMMAND, "tune", *arguments])
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert done.stderr.count(message) == 1, done.stderr  # only rank 0 prints
        assert "fastest" not in done.stdout
    assert broken.read_text() == "{"


def test_an_impossible_table_is_refused_at_the_start(mpirun: MpiRun, tmp_path: Path) -> None:
    """The first collective by a table with 10^9 segments never ended."""
    file = tmp_path / "tuning.json"
    absurd = Entry("all_reduce", 1, 2, "", "any", (MeasuredTime(1 << 30, "double_tree", 10**9, 1e-9),))
    Table((absurd,)).save(file)
    done = mpirun(2, "import commlib; commlib.init()", env={"COMMLIB_TUNING_FILE": str(file)})
    assert done.returncode != 0
    assert f"tuning table {file}: entries[0]: times[0]: segments must be at most 65536, got 1000000000" in done.stderr


def test_tune_does_not_write_where_others_can(mpirun: MpiRun, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    environment = {**KERNELS, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COMMLIB_TUNING_FILE": ""}
    done = mpirun(2, [*COMMAND, "tune", "--seconds", "0.2"], env=environment)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert f"{tmp_path / 'cache'} may be written by everyone" in done.stderr
    assert "name another file with --out" in done.stderr
    assert not list((tmp_path / "cache").iterdir())


def test_one_rank_measures_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, **KERNELS, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, *COMMAND, "tune"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "one rank sends no messages: start more" in done.stderr
    assert "measuring" not in done.stderr and "warming up" not in done.stderr
    assert not list(tmp_path.rglob("tuning.json"))
