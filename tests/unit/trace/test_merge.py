"""One trace of all ranks: its view in viewers, profiles next to timelines, and the command."""

from __future__ import annotations

import gzip
import json

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from tests.inputs.timelines import RankTimeline
from tests.unit.trace.test_files import torch_trace, xplane


def merge(*arguments):
    return CliRunner().invoke(app, ["trace", "merge", *map(str, arguments)])


def two_ranks(tmp_path):
    """Rank 1's clock is 3 s ahead; it is late in a queued collective, and in a blocking one."""
    ranks = [RankTimeline(0), RankTimeline(1, clock="b", ahead=3000, host="there")]
    ranks[1].clock(0)
    for rank, began in zip(ranks, (10, 15), strict=True):
        rank.blocking("all_reduce", 1, began, 16)
        rank.started("all_gather", 2, 17, 18, 20, waits=(19, 20))
        rank.span("codec", "encode", 20, 21, codec="int8")
        rank.step(22)
    return [rank.write(tmp_path / f"t{rank.rank}.json") for rank in ranks]


def merged(tmp_path, *names, out="all.json"):
    result = merge(*names, "-o", tmp_path / out)
    assert result.exit_code == 0, result.output
    data = (tmp_path / out).read_bytes()
    return json.loads(gzip.decompress(data) if out.endswith(".gz") else data)["traceEvents"]


def test_each_rank_is_a_process_on_one_clock(tmp_path):
    events = merged(tmp_path, *two_ranks(tmp_path)[::-1])
    named = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert named == {0: "rank 0 (here)", 1: "rank 1 (there)"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event.get("name") == "process_sort_index"}
    assert order[0] < order[1]
    begun = {
        (event["pid"], event["name"]): event["ts"] for event in events if event["ph"] == "B" and "cat" not in event
    }
    assert begun == {
        (0, "all_reduce"): 0.0, (1, "all_reduce"): 5000.0, (0, "all_gather"): 8000.0, (1, "all_gather"): 8000.0
    }  # fmt: skip
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times) and times[0] == 0


def test_arrows_lead_from_the_last_rank_to_the_waiting_ranks(tmp_path):
    names = two_ranks(tmp_path)
    arrows = [event for event in merged(tmp_path, *names) if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"], event["ts"]) for event in arrows] == [("s", 1, 5000.0), ("f", 0, 5999.0)]
    assert len({event["id"] for event in arrows}) == 1
    assert not [e for e in merged(tmp_path, *names, "--no-arrows") if e["ph"] in "sf"]


def test_a_row_shows_when_the_program_waited(tmp_path):
    events = merged(tmp_path, *two_ranks(tmp_path))
    (row,) = {e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"] == "exposed wait"}
    waits = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e.get("tid") == row and e["ph"] == "X"]
    assert waits == [
        (0, "all_reduce", 0.0, 6000.0), (1, "all_reduce", 5000.0, 1000.0), (0, "all_gather", 9000.0, 1000.0),
        (1, "all_gather", 9000.0, 1000.0),
    ]  # fmt: skip


def test_numbers_of_ranks_do_not_mix(tmp_path):
    """Viewers join overlapping events with one number, even from different processes."""
    events = merged(tmp_path, *two_ranks(tmp_path))
    numbers = [{event["id"] for event in events if event["ph"] in "be" and event["pid"] == rank} for rank in range(2)]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]


def test_profiles_are_next_to_their_rank_on_its_clock(tmp_path):
    """The head of a timeline has the time of day: PyTorch's events are 10.5 ms later, TensorFlow's 2 us."""
    names = two_ranks(tmp_path)
    torch = torch_trace(tmp_path / "torch.json", process=7, rank=1)
    (tmp_path / "tf.xplane.pb").write_bytes(xplane([(2_000_000, 500_000)]))
    events = merged(tmp_path, *names, torch, f"0={tmp_path / 'tf.xplane.pb'}", out="all.json.gz")
    named = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    by_name = {name: pid for pid, name in named.items()}
    first = min(event["ts"] for event in events if event["ph"] == "B")
    start = first - 10_000  # of both timelines, whose first event is 10 ms later
    (add,) = {event["ts"] for event in events if event.get("name") == "aten::add"}
    assert add - start == pytest.approx(10_500, abs=0.01)
    (product,) = [event for event in events if event.get("name") == "MatMul"]
    assert product["ts"] - start == pytest.approx(2, abs=0.01) and product["dur"] == 0.5
    assert product["pid"] == by_name["rank 0: TensorFlow"] not in (0, 1, by_name["rank 1: PyTorch"])


def test_unmergeable_files_give_an_error_of_one_line(tmp_path):
    names = two_ranks(tmp_path)
    for arguments, message in (
        ([*names, "-o", names[0]], "is one of the input files"),
        ([*names, "-o", tmp_path / "missing" / "x.json"], "cannot write"),
        ([tmp_path / "nothing.json", "-o", tmp_path / "x.json"], "cannot read"),
    ):
        result = merge(*arguments)
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split()), result.output
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "x.json").exists()


def test_notes_and_the_alignment_of_clocks_are_printed(tmp_path):
    names = two_ranks(tmp_path)
    (tmp_path / "t2.json").write_text("")
    result = merge(*names, tmp_path / "t2.json", "-o", tmp_path / "all.json")
    assert "t2.json: is empty, and skipped" in result.output
    assert "of 2 ranks (one clock, measured by messages)" in result.output
