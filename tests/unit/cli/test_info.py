"""`commlib info`: every setting with its value, the versions, and an MPI library or why there is none."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

import commlib
from commlib import cuda_probe, launch, mpi_on_gpus
from commlib.cli.app import app
from commlib.config import Config, variable
from commlib.config_rows import rows
from commlib.cuda_probe import Found
from commlib.errors import TransportError


def info(*arguments: str, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(app, ["info", *arguments], catch_exceptions=False, env=environment)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no MPI into the process of the unit tests."""
    monkeypatch.setattr(launch, "find_library", lambda: ("Some MPI 1.2", "/lib/libmpi.so.12"))


def test_every_setting_is_there_with_value_and_meaning() -> None:
    text = info(COMMLIB_STALL_WARNING="2.5")
    for row in rows():
        assert row.variable + "=" in text and row.meaning in text
    assert "COMMLIB_STALL_WARNING=2.5  (default: 60)" in text
    assert "COMMLIB_NODE_PATH=1\n" in text


def test_versions_and_library() -> None:
    text = info()
    assert f"commlib   {commlib.__version__}, " in text
    assert "MPI       Some MPI 1.2 (/lib/libmpi.so.12)" in text


def test_json() -> None:
    told = json.loads(info("--json", COMMLIB_CHECK="always"))
    assert told["commlib"] == commlib.__version__ and told["packages"]["numpy"]
    assert set(told["settings"]) == {variable(field.name) for field in fields(Config)}
    assert told["settings"]["COMMLIB_CHECK"] == "always" and told["settings"]["COMMLIB_NODE_PATH"] is True


def test_no_mpi_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> tuple[str, str]:
        raise TransportError("mpi4py cannot load an MPI library")

    monkeypatch.setattr(launch, "find_library", none)
    assert "MPI       none: mpi4py cannot load an MPI library\n" in info()


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_on_gpus, "may_have_gpu", lambda: False)
    assert "GPUs      none that CuPy could use\n" in info()
    monkeypatch.setattr(mpi_on_gpus, "may_have_gpu", lambda: True)
    for found, text in (
        (Found("MPI X: says 1", ""), "MPI X: says 1; MPI takes memory of a GPU"),
        (Found("MPI X: says 1", "ended by SIGSEGV"), "MPI X: says 1; MPI took none: ended by SIGSEGV"),
        (Found("", "no device"), "MPI could not be asked; MPI took none: no device"),
    ):
        monkeypatch.setattr(cuda_probe, "probe", lambda found=found: found)
        assert f"GPUs      {text}\n" in info(COLUMNS="120")


def test_a_wrong_setting_is_an_error() -> None:
    assert "COMMLIB_TIMEOUT='soon'" in info(code=2, COMMLIB_TIMEOUT="soon")


def test_rank_0_alone_prints() -> None:
    assert info(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2") == ""


def test_it_is_as_wide_as_the_terminal() -> None:
    assert max(map(len, info(COLUMNS="60").splitlines())) <= 60
