"""`commlib show pipeline`: lists, pictures, files, and errors for wrong options."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.pipeline.schedule import make, table
from commlib.pipeline.schedule.csv import read

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"

CALLS = {
    "show_pipeline_list_100_columns": (),
    "show_pipeline_interleaved_100_columns": (
        *("--schedule", "interleaved", "--stages", "4", "--microbatches", "8", "--legend"),
    ),
    "show_pipeline_zb_h1_uneven_100_columns": ("--schedule", "ZB-H1", "--ranks", "3", "--costs", "2,3,1"),
}


def show(*arguments: str, columns: int = 100) -> str:
    result = CliRunner().invoke(
        app, ["show", "pipeline", *arguments], catch_exceptions=False, env={"COLUMNS": str(columns)}
    )
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["show", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", CALLS)
def test_output_matches_the_golden_file(name: str) -> None:
    """To accept new texts: COMMLIB_GOLDEN=write python -m pytest this file, then read the diff."""
    file = GOLDEN / f"{name}.txt"
    got = show(*CALLS[name])
    if os.environ.get("COMMLIB_GOLDEN") == "write":
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")
    assert max(map(len, got.splitlines())) <= 100


def test_a_schedule_is_printed_as_json() -> None:
    listed = json.loads(show("--json"))
    assert [item["name"] for item in listed] == list(table)
    one = json.loads(show("--schedule", "gpipe", "--ranks", "2", "--microbatches", "3", "--json"))
    assert one["seconds"] == 3 * 3 + 3 and one["activations"] == [3, 3] and one["depths"] == {"0>1 B": 2, "0>1 F": 3}
    assert [step["action"] for step in one["programs"][1]][:4] == ["1RECV_F0", "1F0", "1RECV_F1", "1F1"]


def test_csv_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(show("--schedule", "zb_v", "--ranks", "3", "--microbatches", "5", "--csv"))
    assert read(file.read_text(), "zb_v") == make("zb_v", 3, 5)
    assert show("--schedule", str(file)).startswith("mine, 3 ranks, 6 stages, 5 microbatches: ")


def test_a_schedule_is_drawn_as_svg(tmp_path: Path) -> None:
    for name in table:
        file = tmp_path / f"{name}.svg"
        assert show("--schedule", name, "--ranks", "2", "--svg", str(file)).startswith("wrote ")
        everything = ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}rect")
        boxes = [box for box in everything if box.get("class") != "legend"]
        computes = [a for program in make(name, 2, 8).programs for a in program if a.microbatch >= 0]
        assert len(boxes) == 2 + len(computes)
        widths = [float(box.get("width", "0")) for box in boxes]
        assert min(widths) > 1


def texts(file: Path) -> list[str]:
    return [text.text or "" for text in ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}text")]


def test_the_svg_has_a_time_axis_and_a_legend(tmp_path: Path) -> None:
    """Boxes had three colours that nothing explained, and no time."""
    file = tmp_path / "picture.svg"
    show("--schedule", "zb_h1", "--ranks", "3", "--microbatches", "4", "--svg", str(file))
    labels = texts(file)
    at = labels.index("time")
    assert labels[at:] == [
        *("time", "0", "2", "4", "6", "8", "10", "12", "14"),
        *("F3: forward of microbatch 3", "I3: gradients of its inputs", "W3: of the weights", "idle"),
        "time in forwards",
    ]
    show("--schedule", "gpipe", "--ranks", "2", "--costs", "0.01,0.02,0", "--svg", str(file))
    labels = texts(file)
    assert {"0", "0.05", "0.1", "B3: its backward", "time in units of the costs"} <= {*labels}
    assert not [text for text in labels if text.startswith(("I3", "W3"))]


def test_the_text_has_a_time_axis_and_a_legend() -> None:
    call = ("--schedule", "1f1b", "--ranks", "2", "--microbatches", "3")
    result = CliRunner().invoke(app, ["show", "pipeline", *call], env={"COLUMNS": ""})
    lines = result.output.splitlines()
    assert lines[-3] == "time   │ 0              5              10"
    assert lines[-1] == "F3 forward of microbatch 3, B3 its backward, · idle, ─ goes on, time in forwards"
    assert "\ntime    in units of --costs" in show(*call)  # on a terminal a line for each symbol
    assert show(*call, "--no-legend").splitlines()[-1] == lines[-3]
    assert "rounded to whole ones" in CliRunner().invoke(
        app, ["show", "pipeline", *call, "--costs", "1,1.5,1"], env={"COLUMNS": ""}
    ).output  # fmt: skip


def test_the_axis_continues_where_rows_wrap() -> None:
    rows = [line for line in show("--schedule", "1f1b", "--no-legend", columns=60).splitlines() if "time " in line[:5]]
    assert rows == [
        "time   │ 0              5              10             15",
        "time   │ 17       20             25             30",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pipeline", "--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("pipeline", "--schedule", "zb_v", "--stages", "3"), "2 stages on each rank: 3 is not a multiple"),
        (("pipeline", "--schedule", "1f1b", "--costs", "1,2"), "expected three numbers, of F, I and W"),
        (("pipeline", "--schedule", "1f1b", "--costs", "-1,2,1"), "numbers that are not negative"),
        (("pipeline", "--schedule", "no.csv"), "no.csv: No such file"),
        (("pipeline", "--schedule", "1f1b", "--microbatches", "100000"), "more than the 200000 that can be shown"),
        (("pipeline", "--csv"), "--csv needs --schedule"),
        (("pipeline", "--algorithm", "ring"), "--algorithm is not for pipeline"),
        (("all_reduce", "--schedule", "1f1b"), "--schedule is for pipeline: commlib show pipeline"),
        (("mesh", "--axes", "pp=2", "--microbatches", "2"), "--microbatches is for pipeline"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*arguments)


def test_a_deadlock_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    result = CliRunner().invoke(app, ["show", "pipeline", "--schedule", str(file)], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "deadlock" in result.output and "↑" in result.output
