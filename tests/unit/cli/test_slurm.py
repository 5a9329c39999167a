"""`commlib slurm`: scripts, files, and errors for wrong options. tests/slurm has a real Slurm."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.errors import TransportError
from commlib.launch import mpi_start
from commlib.slurm import client
from commlib.slurm.job import Job


def slurm(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["slurm", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder, a stand-in for the MPI library, and no Slurm."""
    monkeypatch.setattr(mpi_start, "find_library", lambda: ("Open MPI v5.0.11", "/lib/libmpi.so.40"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path


def test_there_is_a_flag_for_each_option() -> None:
    command = get_command(app).commands["slurm"].commands["run"]  # type: ignore[attr-defined]
    flags = {"modules" if item.name == "module" else item.name for item in command.params}
    assert {item.name for item in fields(Job)} - {"output"} <= flags


def test_a_script_is_printed(place: Path) -> None:
    text = slurm("run", "-N", "2", "--ntasks-per-node", "4", "--", "python", "train.py", "--nodes", "x")
    assert text.startswith("#!/bin/bash\n") and "#SBATCH --nodes=2\n" in text
    assert text.endswith("srun --mpi=pmix --kill-on-bad-exit=1 \\\n    python train.py --nodes x\n")
    assert f"source {sys.prefix}/bin/activate\n" in text
    assert sorted(path.name for path in place.iterdir()) == ["bin"]


def test_options_end_at_the_command() -> None:
    assert slurm("run", "-N", "2", "train", "-N", "3").endswith("    train -N 3\n")


def test_a_script_is_written(place: Path) -> None:
    assert slurm("run", "--script", "job.sh", "--folder", "out", "--array", "0-1", "--", "true") == ""
    assert "#SBATCH --output=out/%A_%a.out\n" in (place / "job.sh").read_text()
    assert (place / "out").is_dir()  # Slurm does not create it, and the job would fail without a message


@pytest.mark.parametrize(
    ("library", "mpi"), [("Open MPI v5", "pmix"), ("MPICH 5", "pmi2"), ("Intel(R) MPI 21", "pmi2")]
)
def test_mpi_follows_the_library_of_this_python(monkeypatch: pytest.MonkeyPatch, library: str, mpi: str) -> None:
    monkeypatch.setattr(mpi_start, "find_library", lambda: (library, ""))
    assert f"\nsrun --mpi={mpi} " in slurm("run", "true")
    assert "\nmpirun " in slurm("run", "--mpi", "mpirun", "true")


def test_a_wheel_of_open_mpi_gets_the_path_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun its error texts were missing: mpirun sets their path."""
    monkeypatch.setattr(mpi_start, "find_library", lambda: ("Open MPI v5", f"{sys.prefix}/lib/libmpi.so.40"))
    assert f"\nexport OPAL_PREFIX={sys.prefix}\n" in slurm("run", "true")
    assert "\nexport OPAL_PREFIX=/there\n" in slurm("run", "--env", "OPAL_PREFIX=/there", "true")
    for options in (("--mpi", "mpirun"), ("--venv", "/another"), ("--venv", "none")):
        assert "OPAL_PREFIX" not in slurm("run", *options, "true")


def test_a_missing_mpi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, str]:
        raise TransportError("mpi4py cannot load an MPI library")

    monkeypatch.setattr(mpi_start, "find_library", none)
    assert "mpi is not given, and this Python finds no MPI library" in " ".join(slurm("run", "true", code=2).split())


def test_flags_win_over_the_file(place: Path) -> None:
    (place / "job.toml").write_text(
        'nodes = 2\ntime = "10"\nmodules = ["gcc"]\nrequeue = true\nenv = {A = "1", B = "2"}\ncommand = "a"'
    )
    text = slurm("run", "--config", "job.toml", "-N", "3", "--env", "B=3", "--module", "llvm", "--no-requeue")
    for expected in ("--nodes=3\n", "--time=10\n", "--no-requeue\n", "load llvm\n", "A=1\n", "B=3\n", "    a\n"):
        assert expected in text
    assert "    b\n" in slurm("run", "--config", "job.toml", "b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "-N", "0", "x"], "nodes is 0: expected at least 1"),
        (["run", "--cpus-per-task", "0", "x"], "cpus-per-task is 0: expected at least 1"),
        (["run", "-t", "soon", "x"], "time 'soon': expected minutes"),
        (["run", "--submit"], "no command: expected the command of each rank"),
        (["run", "--env", "A", "x"], "env 'A': expected NAME=VALUE"),
        (["run", "--config", "none.toml", "x"], "cannot read none.toml: No such file"),
        (["run", "--container", "x.sif", "x"], "mpi is not given: a container's MPI library is unknown"),
        (["run", "--script", "no/job.sh", "x"], "cannot write no/job.sh: No such file or directory"),
        (["run", "--folder", "a%j", "x"], "folder a%j: expected a path without %"),
        (["run", "--folder", 'a"b', "x"], 'expected a path without "'),
        (["bench", "-N", "2"], "no benchmark: expected the arguments of `commlib bench`"),
        (["bench", "--", "report", "a.jsonl"], "bench report reads results and needs no job"),
        (["wait", "x"], "'x': expected the number of a job"),
        (["wait", "12"], "there is no folder slurm-jobs"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], expected: str) -> None:
    assert expected in " ".join(slurm(*arguments, code=2).split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["all_reduce", "--peer", "mpi"], 'all_reduce --peer mpi --out "there/$SLURM_JOB_ID"'),
        (["all_reduce", "--out", "here"], "all_reduce --out here"),
        (["all_reduce", "--out=here"], "all_reduce --out=here"),
        (["sweep", "plans/a.toml", "--retry"], "sweep plans/a.toml --retry --out there/a.jsonl"),
        (["sweep", "--verb", "barrier"], "sweep --verb barrier --out there/sweep.jsonl"),
        (["step", "dp", "--peer", "gloo"], "step dp --peer gloo --out there/step.jsonl"),
        (["sweep", "a.toml", "-o", "b.jsonl"], "sweep a.toml -o b.jsonl"),
    ],
)
def test_a_benchmark_has_a_folder_for_its_results(arguments: list[str], expected: str) -> None:
    text = slurm("bench", "--folder", "there", "--", *arguments)
    assert text.endswith(f"    python -m commlib bench {expected}\n")
    assert "--job-name=commlib-bench\n" in text


def test_the_results_of_an_array_are_in_one_folder() -> None:
    text = slurm("bench", "--array", "0-1", "--folder", "there", "--", "barrier")
    assert text.endswith(' --out "there/$SLURM_ARRAY_JOB_ID"\n')


STATE = "JobId=12 JobState={} Reason=None ExitCode={} RunTime=00:00:03 NodeList=h0 Restarts=0"


def test_a_submitted_job_is_awaited_and_collected(place: Path) -> None:
    stand_in(
        place / "bin",
        "sbatch",
        "mkdir slurm-jobs/12; cat > slurm-jobs/12/text; printf 'a\\nb\\n' > slurm-jobs/12.out; echo 12",
    )
    running, failed = STATE.format("RUNNING", "0:0"), STATE.format("FAILED", "5:0")
    stand_in(place / "bin", "scontrol", f'test -e again && echo "{failed}" || echo "{running}"; touch again')
    text = slurm("run", "--wait", "true", code=5)
    assert text.splitlines() == [
        "12",
        "job 12: RUNNING on h0",
        "a",
        "b",
        "job 12: FAILED on h0, 00:00:03, exit code 5, output in slurm-jobs/12.out",
        "results in slurm-jobs/12/text",
    ]
    folder = place / "slurm-jobs"
    assert (folder / "12.sh").read_text() == (folder / "12/text").read_text()
    record = json.loads((folder / "12.json").read_text())
    assert (record["exit_code"], record["results"], record["tasks"][0]["state"]) == (
        5,
        ["slurm-jobs/12/text"],
        "FAILED",
    )
    assert "exit code 5" in slurm("wait", "12", code=5)


def test_a_job_that_was_cancelled_before_it_began_has_no_output(place: Path) -> None:
    (place / "slurm-jobs").mkdir()
    stand_in(place / "bin", "scontrol", f'echo "{STATE.format("CANCELLED", "0:0")}"')
    assert slurm("wait", "12", code=1) == "job 12: CANCELLED on h0, 00:00:03, exit code 1, no output\n"


def test_an_interrupt_leaves_the_job_running(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "wait_for_job", interrupted)
    (place / "my jobs").mkdir()
    message = "job 12 continues: `commlib slurm wait 12 --folder 'my jobs'` waits for it, `scancel 12` ends it\n"
    assert slurm("wait", "12", "--folder", "my jobs", code=130) == message


def test_the_wait_for_a_silent_controller_ends(place: Path) -> None:
    (place / "slurm-jobs").mkdir()
    stand_in(place / "bin", "scontrol", "echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1")
    assert slurm("wait", "12", "--patience", "0.4", code=1).splitlines() == [
        "job 12: no answer: scontrol: Unable to contact slurm controller (the wait ends after 0.4 s without one)",
        "commlib slurm: Slurm has not answered for 1 s: scontrol: Unable to contact slurm controller; "
        "this does not end job 12: `commlib slurm wait 12 --folder slurm-jobs` waits for it",
    ]


def test_one_process_of_a_launcher_submits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert slurm("run", "true") == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert slurm("run", "true").startswith("#!/bin/bash")


def test_submitting_alone_prints_the_number(place: Path) -> None:
    stand_in(place / "bin", "sbatch", "cat > /dev/null; echo 12")
    assert slurm("run", "--submit", "--folder", "there", "true") == "12\n"
    assert (place / "there/12.sh").exists()


def test_a_refused_job_is_an_error(place: Path) -> None:
    stand_in(place / "bin", "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert slurm("run", "--submit", "true", code=1) == "commlib slurm: sbatch refuses the job: invalid partition\n"
