"""`commlib show`: lists, pictures, predictions, and errors for wrong options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.cli.prediction import make_machine
from commlib.console.text import bytes_text, columns, parse_bytes, seconds_text
from commlib.cost.flat import predict_flat
from commlib.cost.hierarchical import predict_hierarchical
from commlib.cost.model import DEFAULT
from commlib.cost.records import FittedMachine
from commlib.cost.table import Table
from commlib.schedule import LinkCost, algorithms, find, program, render, verbs
from commlib.schedule.expansion import rail_algorithms
from commlib.schedule.hierarchy import HIERARCHICAL

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"


def show(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    """Return the output of a wrong call, on one line."""
    result = CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


GOLDEN_CALLS = {
    "show_all_reduce_double_tree": ("all_reduce", "--algorithm", "double_tree", "--ranks", "4", "--segments", "2"),
    "show_all_reduce_hierarchical": (
        *("all_reduce", "--algorithm", "hierarchical", "--nodes", "2", "--ranks-per-node", "3"),
        *("--rails", "2", "--between", "recursive_doubling"),
    ),
    "show_all_to_all_predict": (
        *("all_to_all", "--predict", "--nodes", "16", "--ranks-per-node", "4"),
        *("--bytes", "4K", "--bytes", "1M", "--bytes", "64M"),
        *("--alpha-us", "10", "--bandwidth-gbs", "20", "--node-alpha-us", "2", "--node-bandwidth-gbs", "8"),
        *("--gamma-gbs", "5"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN_CALLS)
def test_output_matches_the_golden_file(name: str) -> None:
    """To accept new texts: COMMLIB_GOLDEN=write python -m pytest tests/unit/cli/test_show.py, then read the diff."""
    file = GOLDEN / f"{name}.txt"
    got = show(*GOLDEN_CALLS[name])
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", verbs())
def test_algorithms_of_a_verb_are_listed(verb: str) -> None:
    lines = show(verb).splitlines()
    for line, name in zip(lines, algorithms(verb), strict=False):
        assert line.split() == [name, *find(verb, name).description.split("\n")[0].split()]
    listed = json.loads(show(verb, "--json"))
    assert [item["name"] for item in listed] == list(algorithms(verb))


def test_a_program_is_drawn() -> None:
    text = show("broadcast", "--algorithm", "chain", "--ranks", "3", "--root", "1", "--segments", "2")
    programs = [program("broadcast", "chain", rank, 3, root=1, segments=2) for rank in range(3)]
    assert text == f"{find('broadcast', 'chain').description}\n\n{render(programs)}"
    assert "Source: Sanders, Speck & Träff 2009" in text


def test_a_program_is_printed_as_json() -> None:
    first, second = json.loads(show("all_gather", "--algorithm", "ring", "--ranks", "2", "--json"))
    assert (first["rank"], first["size"], first["regions"]) == (0, 2, [2])
    assert first["rounds"][0]["sends"] == [{"peer": 1, "span": {"start": 0, "stop": 1}}]
    assert second["rounds"][0]["recvs"] == [{"peer": 0, "span": {"start": 0, "stop": 1}, "reduce": False}]


def test_predictions_come_from_the_model() -> None:
    data = json.loads(
        show("all_reduce", "--predict", "--nodes", "4", "--ranks-per-node", "2", "--bytes", "1M", "--json")
    )
    (row,) = data["rows"]
    assert row["bytes"] == 1 << 20
    expected = {name: predict_flat("all_reduce", name, 4, 2, 1 << 20, DEFAULT) for name in algorithms("all_reduce")}
    for name in algorithms("all_reduce"):
        expected[f"h:{name}"] = predict_hierarchical("all_reduce", name, 4, 2, 1 << 20, DEFAULT)
    assert row["seconds"] == expected
    assert row["seconds"][row["best"]] == min(expected.values())


@pytest.mark.parametrize("verb", verbs())
def test_sixteen_thousand_ranks_are_predicted(verb: str) -> None:
    lines = show(verb, "--predict", "--nodes", "2048", "--ranks-per-node", "8").splitlines()
    assert lines[0].startswith(f"{verb}, predicted for 2048 x 8 = 16384 ranks")
    header = next(line for line in lines if line.startswith("bytes"))
    names = [*algorithms(verb), *(f"h:{name}" for name in rail_algorithms(verb) if verb in HIERARCHICAL)]
    assert header.split() == ["bytes", *names]
    rows = lines[lines.index(header) + 1 :]
    assert [row.split()[0] for row in rows] == ["4K", "64K", "1M", "16M", "256M", "4G"]
    assert all(row.count("*") == 1 for row in rows)


def test_one_rank_per_node_and_one_node_have_no_hierarchy() -> None:
    for shape in (("4", "1"), ("1", "4")):
        text = show("all_reduce", "--predict", "--nodes", shape[0], "--ranks-per-node", shape[1], "--algorithm", "ring")
        assert "h:" not in text
        assert text.splitlines()[3].split() == ["bytes", "ring"]


def test_a_machine_comes_from_a_tuning_file_and_options(tmp_path: Path) -> None:
    fitted = FittedMachine("Some MPI 1.0", LinkCost(3e-6, 4e-10), None, 2e-10)
    Table((), (fitted,)).save(tmp_path / "tuning.json")
    tuning = ("--tuning", str(tmp_path / "tuning.json"), "--bandwidth-gbs", "20", "--json")
    machine = json.loads(show("barrier", "--predict", *tuning))["machine"]
    assert machine == {
        "node": {"alpha": 3e-6, "beta": 4e-10},
        "network": {"alpha": DEFAULT.network.alpha, "beta": pytest.approx(5e-11)},
        "gamma": 2e-10,
    }
    Table().save(tmp_path / "tuning.json")
    assert "describes no machine" in refused("barrier", "--predict", *tuning)
    assert "missing.json" in refused("barrier", "--predict", "--tuning", "missing.json")


def test_every_number_of_the_machine_can_be_given() -> None:
    given = make_machine(None, alpha_us=1, bandwidth_gbs=2, node_alpha_us=3, node_bandwidth_gbs=4, gamma_gbs=5)
    assert given.network == LinkCost(1e-6, pytest.approx(1 / 2e9))  # type: ignore[arg-type]
    assert given.node == LinkCost(pytest.approx(3e-6), pytest.approx(1 / 4e9))  # type: ignore[arg-type]
    assert given.gamma == pytest.approx(1 / 5e9)
    assert make_machine(None) == DEFAULT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_shrink",), "no collective is called 'all_shrink'; known are"),
        (("all_reduce", "--algorithm", "star"), "all_reduce has no algorithm 'star'; known are ring"),
        (("all_reduce", "--algorithm", "ring", "--root", "1"), "all_reduce has no root, got root=1"),
        (("broadcast", "--algorithm", "chain", "--ranks", "2", "--root", "2"), "root must be in 0..1, got 2"),
        (("all_reduce", "--algorithm", "ring", "--segments", "2"), "is not pipelined, got segments=2"),
        (("all_reduce", "--algorithm", "ring", "--ranks", "0"), "'--ranks'"),
        (("all_reduce", "--algorithm", "ring", "--ranks", "1000"), "'--ranks'"),
        (("scan", "--algorithm", "hierarchical"), "scan has no hierarchical form; expected one of all_reduce"),
        (("all_reduce", "--algorithm", "hierarchical", "--rails", "3"), "rails must be in 1..2, the size of the small"),
        (("all_reduce", "--algorithm", "hierarchical", "--between", "star"), "'star' does not run between nodes; exp"),
        (("all_reduce", "--algorithm", "hierarchical", "--ranks", "4"), "--ranks is not for --algorithm hierarchical"),
        (("all_reduce", "--algorithm", "hierarchical", "--bytes", "4"), "--bytes is not for --algorithm hierarchical"),
        (("all_reduce", "--algorithm", "hierarchical", "--nodes", "1000"), "is 2000; at most 128 can be drawn"),
        (("all_reduce", "--algorithm", "ring", "--rails", "2"), "--rails is for --algorithm hierarchical"),
        (("all_reduce", "--predict", "--between", "ring"), "--between is for --algorithm hierarchical"),
        (("all_reduce", "--axes", "dp=2"), "--axes is for mesh: commlib show mesh"),
        (("all_reduce", "--refactor", "dp:a=2"), "--refactor is for mesh"),
        (("all_reduce", "--ranks", "4"), "--ranks is for drawing: give --algorithm"),
        (("all_reduce", "--nodes", "4"), "--nodes is for --predict"),
        (("all_reduce", "--gamma-gbs", "4"), "--gamma-gbs is for --predict"),
        (("all_reduce", "--predict", "--ranks", "4"), "--ranks is not for --predict: give --nodes"),
        (("all_reduce", "--predict", "--algorithm", "star"), "all_reduce has no algorithm 'star'"),
        (
            ("all_reduce", "--predict", "--nodes", "4096"),
            "4096 nodes of 8 ranks are more than the supported 16384 ranks",
        ),
        (("all_reduce", "--predict", "--bytes", "7X"), "'7X' is not a size; expected a number of bytes"),
        (("all_reduce", "--predict", "--bytes", "-1"), "'-1' is not a size"),
        (("all_reduce", "--predict", "--bandwidth-gbs", "0"), "'--bandwidth-gbs'"),
        ((), "Missing argument"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_show_needs_no_mpi() -> None:
    code = """
import sys
from commlib.cli import main
sys.argv = ["commlib", "show", "all_reduce", "--predict"]
try:
    main()
except SystemExit as end:
    assert not end.code
print(*({"mpi4py", "numpy", "numba"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "predicted for 2 x 8" in done.stdout
    assert done.stderr.strip() == ""


# How numbers are written


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("4096", 4096), ("4K", 4096), ("4k", 4096), ("64M", 64 << 20), ("1G", 1 << 30)]
)
def test_sizes_are_parsed(text: str, value: int) -> None:
    assert parse_bytes(text) == value
    assert parse_bytes(bytes_text(value)) == value


def test_sizes_are_written_exactly() -> None:
    written = {1536: "1536", 1 << 20: "1M", 3 << 30: "3G", 1 << 40: "1024G", 0: "0"}
    assert {value: bytes_text(value) for value in written} == written


def test_seconds_are_formatted() -> None:
    values: dict[float, Any] = {
        0: "0.00 us",
        1.234e-6: "1.23 us",
        99.96e-6: "100 us",
        999.6e-6: "1.00 ms",
        0.5: "500 ms",
    }
    values |= {9.996: "10.0 s", 1234.5: "1230 s"}
    assert {value: seconds_text(value) for value in values} == values


def test_columns_are_aligned() -> None:
    assert columns([["a", "b"], ["long", "7"]]) == "a     b\nlong  7"
