"""`commlib show mesh`: pictures, data, and errors for wrong options.

To accept new pictures: COMMLIB_GOLDEN=write python -m pytest tests/unit/cli/test_show_mesh.py, then read the diff.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.mesh import MeshShape

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
CLUSTER = ("--axes", "pp=2,dp=-1,tp=2", "--ranks", "16", "--ranks-per-node", "8")


def show(*arguments: str, columns: str = "") -> str:
    result = CliRunner().invoke(app, ["show", "mesh", *arguments], catch_exceptions=False, env={"COLUMNS": columns})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", ["", "60"])
def test_output_matches_the_golden_file(columns: str) -> None:
    file = GOLDEN / f"show_mesh{f'_{columns}_columns' * bool(columns)}.txt"
    got = show(*CLUSTER, columns=columns)
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


def test_output_is_the_picture_of_the_shape() -> None:
    mesh = MeshShape.of({"pp": 2, "dp": 4, "tp": 2}, 16)
    assert show(*CLUSTER) == mesh.picture(ranks_per_node=8)
    assert show("--axes", "pp=2, dp=4, tp=2") == mesh.picture()  # the number of ranks follows from the sizes


def test_a_refactoring_is_drawn() -> None:
    mesh = MeshShape.of({"dp": 8, "tp": 2}, 16)
    once = ("--refactor", "dp:edp=-1,ep=2")
    assert show("--axes", "dp=8,tp=2", *once) == mesh.refactor({"dp": {"edp": 4, "ep": 2}}).picture()
    twice = mesh.refactor({"dp": {"edp": 4, "ep": 2}, ("dp", "tp"): {"a": 16}})
    assert show("--axes", "dp=8,tp=2", *once, "--refactor", "dp,tp:a=-1") == twice.picture()


def test_a_mesh_is_printed_as_json() -> None:
    data = json.loads(show("--axes", "dp=2,tp=2", "--refactor", "dp:a=2,b=1", "--json"))
    assert (data["ranks"], data["order"]) == (4, ["a", "b", "tp"])
    assert {axis["name"]: axis["size"] for axis in data["axes"]} == {"a": 2, "b": 1, "tp": 2, "dp": 2}
    assert data["axes"][-1]["groups"] == [[0, 2], [1, 3]]


def test_a_hundred_thousand_ranks_are_drawn() -> None:
    text = show("--axes", "pp=16,dp=-1,tp=8", "--ranks", "131072", "--ranks-per-node", "8")
    assert "Mesh(pp=16, dp=1024, tp=8): 131072 ranks, 16384 nodes of 8" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "mesh needs axes, the last one the fastest, such as --axes pp=2,dp=-1,tp=2"),
        (("--axes", "dp"), "--axes: 'dp' is no axis; expected names and sizes"),
        (("--axes", "dp=two"), "'dp=two' is no axis"),
        (("--axes", "dp=-1"), "give --ranks, from which the axis with -1 is inferred"),
        (("--axes", "dp=3,tp=2", "--ranks", "8"), "3 x 2 = 6, but there are 8 ranks; with dp=-1 it would be 4"),
        (("--axes", "dp=-1", "--ranks", "200000"), "200000 ranks are more than the 131072"),
        (("--axes", "dp=4", "--refactor", "dp"), "expected old axes, a colon and new ones"),
        (("--axes", "dp=4", "--refactor", "dp:a=3,b=-1"), "3 does not divide 4 ranks along dp"),
        (("--axes", "dp=4", "--refactor", "dp:a=2,a=2"), "the names of the new axes must differ"),
        (("--axes", "dp=4", "--algorithm", "ring"), "--algorithm is not for mesh"),
        (("--axes", "dp=4", "--predict"), "--predict is not for mesh"),
        (("--axes", "dp=4", "--nodes", "2"), "--nodes is not for mesh"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["show", "mesh", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_show_mesh_needs_neither_numpy_nor_mpi() -> None:
    code = """
import sys
from commlib.cli import main
sys.argv = ["commlib", "show", "mesh", "--axes", "dp=2"]
try:
    main()
except SystemExit as end:
    assert not end.code
print(*({"mpi4py", "numpy", "numba"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Mesh(dp=2): 2 ranks" in done.stdout
    assert done.stderr.strip() == ""
