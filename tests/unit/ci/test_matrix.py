"""ci/matrix.py: `ci/test full` leaves out nothing that the usual run has, and all folders of tests are in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import matrix

ROOT = Path(__file__).parents[3]
WITHOUT_SUITE = {
    "bodies",
    "cuda",
    "golden",
    "inputs",
    "late",
    "oracles",
    "plugins",
    "soak",
}  # soaks are no tests of pytest


@pytest.mark.parametrize("mpi", [matrix.NONE, matrix.FIRST, matrix.OTHER])
def test_the_full_run_includes_the_usual_run(mpi: str) -> None:
    usual, full = ({name: suite for name, suite, _ in matrix.suites(extent, mpi)} for extent in ("usual", "full"))
    assert usual and usual.keys() <= full.keys()
    for name, suite in usual.items():
        assert not full[name].variants or suite.variants == full[name].variants, name
        assert full[name].again in ("", suite.again), name


def test_every_folder_of_tests_is_run() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {suite.folder for suite in matrix.SUITES} == folders - WITHOUT_SUITE


def test_a_run_has_a_name_of_its_own() -> None:
    for extent in matrix.EXTENTS:
        for mpi in (matrix.NONE, matrix.FIRST, matrix.OTHER):
            names = [name for name, _, _ in matrix.suites(extent, mpi)]
            assert len(set(names)) == len(names)
