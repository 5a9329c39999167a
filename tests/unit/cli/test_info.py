"""`commlib info`: versions, the MPI library or why there is none, settings with their origin, and problems."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commlib
from commlib import cuda_aware_mpi
from commlib.cli.app import app
from commlib.config.rows import rows
from commlib.config.settings import Config, variable
from commlib.diagnosis import machine, mpi
from commlib.diagnosis.facts import MpiFacts
from commlib.diagnosis.mpi import MpiTrial
from commlib.errors import TransportError
from commlib.launch import launcher_match, mpi_start
from commlib.transport import cuda_probe
from commlib.transport.cuda_probe import ProbeResult

STARTED = MpiFacts("", "", "MPICH", "mpich", "", "4.1", "MULTIPLE", "no (says 0)", 0.25)


def info(*arguments: str, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, ["info", *arguments], catch_exceptions=False, env=environment)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no MPI into the process of the unit tests."""
    monkeypatch.setattr(mpi_start, "find_library", lambda: ("Some MPI 1.2", "/lib/libmpi.so.12"))
    monkeypatch.setattr(mpi, "try_alone", lambda seconds: MpiTrial(STARTED, True))
    monkeypatch.setattr(machine, "read_load", lambda root: 0.1)  # independent of other processes here


def test_every_setting_is_shown_with_value_and_meaning() -> None:
    text = info("--all", COMMLIB_STALL_WARNING="2.5")
    for row in rows():
        assert row.variable + "=" in text and row.meaning in text
    assert "COMMLIB_STALL_WARNING=2.5  (default: 60)" in text
    assert "COMMLIB_NODE_PATH=1\n" in text


def test_versions_and_library_are_shown() -> None:
    text = info()
    assert f"commlib   {commlib.__version__}, " in text
    assert "MPI       Some MPI 1.2 (/lib/libmpi.so.12)" in text


def test_info_is_printed_as_json() -> None:
    data = json.loads(info("--json", COMMLIB_CHECK="always"))
    assert data["commlib"] == commlib.__version__ and data["packages"]["numpy"]
    assert set(data["settings"]) == {variable(field.name) for field in fields(Config)}
    assert data["settings"]["COMMLIB_CHECK"] == "always" and data["settings"]["COMMLIB_NODE_PATH"] is True


def test_a_missing_mpi_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, str]:
        raise TransportError("mpi4py cannot load an MPI library")

    monkeypatch.setattr(mpi_start, "find_library", none)
    assert "MPI       none: mpi4py cannot load an MPI library\n" in info()


def test_gpus_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_aware_mpi, "may_have_gpu", lambda: False)
    assert "GPUs      none usable by CuPy\n" in info()
    monkeypatch.setattr(cuda_aware_mpi, "may_have_gpu", lambda: True)
    for answer, text in (
        (ProbeResult("MPI X: says 1", ""), "MPI X: says 1; MPI accepted GPU memory"),
        (ProbeResult("MPI X: says 1", "ended by SIGSEGV"), "MPI X: says 1; MPI failed on GPU memory: ended by SIGSEGV"),
        (ProbeResult("", "no device"), "MPI could not be asked; MPI failed on GPU memory: no device"),
    ):
        monkeypatch.setattr(cuda_probe, "probe", lambda answer=answer: answer)
        assert f"GPUs      {text}\n" in info(COLUMNS="120")


def test_a_wrong_setting_is_an_error() -> None:
    assert "COMMLIB_TIMEOUT='soon'" in info(code=2, COMMLIB_TIMEOUT="soon")


def test_rank_0_alone_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library is not the launcher's: that error ends another rank; the first may have another library.

    Whether this process has Open MPI's libraries depends on the tests before.
    """
    monkeypatch.setattr(launcher_match, "mapped_libraries", lambda name: [])
    monkeypatch.setattr(mpi_start, "was_started", lambda: False)
    environment = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    result = CliRunner().invoke(app, ["info"], env=environment)
    assert result.output == "" and isinstance(result.exception, TransportError)
    assert str(result.exception).startswith("rank 1 on ")


def test_output_is_as_wide_as_the_terminal() -> None:
    assert max(map(len, info(COLUMNS="60").splitlines())) <= 60


def test_the_mpi_library_is_described() -> None:
    text = info()
    assert "MPI 4.1, ABI mpich, MPI_THREAD_MULTIPLE, started in 250 ms\n" in text
    assert "accepts GPU memory: no (says 0)\n" in text


def test_changed_settings_have_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("timeout = 60\n")
    assert "settings  all have their defaults" in info(COMMLIB_CONFIG="none")
    text = info(COMMLIB_CONFIG=str(file), COMMLIB_SPINS="3")
    assert f"settings  COMMLIB_TIMEOUT=60 (file {file}), COMMLIB_SPINS=3 (environment)\n" in text
    data = json.loads(info("--json", COMMLIB_CONFIG=str(file)))
    assert data["settings"]["COMMLIB_TIMEOUT"] == 60.0 and data["origins"]["COMMLIB_TIMEOUT"] == f"file {file}"
    assert data["origins"]["COMMLIB_SPINS"] == "default"


def test_problems_and_remedies_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert info().endswith("\nNothing is wrong, as far as commlib can see.\n")
    monkeypatch.setattr(mpi, "try_alone", lambda seconds: MpiTrial(STARTED, False))
    text = info(COLUMNS="200")
    assert "\nWhat is wrong:\n- warning: rank 0: reading another process's memory is not permitted" in text
    assert text.rstrip().splitlines()[-1].startswith("    type: docker run --cap-add=SYS_PTRACE")
    (problem,) = json.loads(info("--json"))["problems"]
    assert problem["level"] == "warning" and problem["cure"]


def test_a_busy_machine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reported no problem while other processes used all cores."""
    monkeypatch.setattr(machine, "read_load", lambda root: 1000.0)
    monkeypatch.setattr(machine, "find_busy", lambda root: ("burner (process 7, 99% of a core)",))
    text = info(COLUMNS="500")
    assert "not bound; load 1000.0 in the last minute" in text and "Nothing is wrong" not in text
    assert "1000.0 processes wanted its" in text and "(burner (process 7, 99% of a core)): timings" in text


def test_an_error_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "try_alone", lambda seconds: MpiTrial(failure=f"MPI did not start within {seconds:g} s"))
    assert "- error: MPI did not start within 7 s" in info("--timeout", "7", code=1)


def test_a_shell_of_srun_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4000"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    text = info()
    assert "launcher  srun (without PMI)" in text and "Nothing is wrong" in text


def test_output_fits_a_screen() -> None:
    assert len(info(COLUMNS="80", COMMLIB_CONFIG="none").splitlines()) <= 40
