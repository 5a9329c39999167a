"""The trace: Chrome's format, rows, and the state of the file."""

from __future__ import annotations

import json
import time

import pytest

from commlib.errors import UsageError
from commlib.observe.recorder import MESSAGES, Record, Recorder
from commlib.observe.timeline import Timeline


def traced(path, rank=0, **options):
    recorder, timeline = Recorder(), Timeline(str(path), rank=rank, **options)
    recorder.subscribe(timeline.read)
    return recorder, timeline


def named_rows(events):
    return {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}


def of_row(events, name):
    rows = {name: row for row, name in named_rows(events).items()}
    return [event for event in events if event.get("tid") == rows[name] and event["ph"] in "BEi"]


def test_groups_and_names_have_rows(tmp_path):
    recorder, timeline = traced(tmp_path / "t.json", rank=3)
    first, second = (Record(recorder, f"all_reduce of {n} x float32", "world", "world", nbytes=4 * n) for n in (1, 2))
    first.queue()
    second.queue()
    first.sequence = 5
    first.run()
    first.round("round 1 of block 1 posted")
    first.end()
    second.begin()
    second.run()
    second.end(ValueError("bad"))
    gradient = Record(recorder, "allreduce", "process set 0", ("grad",), name="grad")
    gradient.queue()
    gradient.run()
    gradient.end()
    recorder.mark("CYCLE_START", "process set 0")
    timeline.close()
    timeline.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert {event["pid"] for event in events} == {3}
    assert sorted(named_rows(events).values()) == ["cycles", "grad", "world"]
    world = of_row(events, "world")
    assert [event["ph"] for event in world] == ["B", "i", "E", "B", "E"]
    facts = {"call": "all_reduce of 1 x float32", "group": "world", "sequence": 5, "bytes": 4}
    assert world[0]["name"] == "all_reduce" and world[0]["args"] == facts
    assert world[-1]["args"] == {"error": "ValueError: bad"}
    assert [(event["ph"], event.get("name")) for event in of_row(events, "grad")] == [
        ("B", "NEGOTIATE_ALLREDUCE"), ("E", None), ("B", "ALLREDUCE"), ("E", None)
    ]  # fmt: skip
    assert [event["name"] for event in of_row(events, "cycles")] == ["CYCLE_START"]
    waits = [(event["ph"], event["id"]) for event in events if event.get("cat") == "queue"]
    assert waits == [("b", 1), ("b", 2), ("e", 1), ("e", 2)]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)


def test_operations_that_never_began_leave_no_open_span(tmp_path):
    recorder, timeline = traced(tmp_path / "t.json")
    for name in ("", "grad"):
        record = Record(recorder, "allreduce", "world", (name,), name=name)
        record.queue()
        record.end(ValueError("shut down"))
    timeline.close()
    phases = [event["ph"] for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] != "M"]
    assert phases == ["b", "e", "B", "E"]


def test_messages_may_overlap(tmp_path):
    recorder, timeline = traced(tmp_path / "t.json")
    first, second = (Record(recorder, "send to rank 1, tag 0", "world", MESSAGES, nbytes=8) for _ in range(2))
    for step in (first.run, second.run, first.end, second.end):
        step()
    timeline.close()
    events = [event for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] != "M"]
    assert [(event["ph"], event["id"], event["name"]) for event in events] == [
        ("b", 1, "send"), ("b", 2, "send"), ("e", 1, "send"), ("e", 2, "send")
    ]  # fmt: skip


def test_the_file_of_a_killed_job_can_be_read(tmp_path):
    """Events are soon in the file, in whole lines; only the closing bracket is missing."""
    recorder, timeline = traced(tmp_path / "t.json")
    Record(recorder, "barrier", "world", "world").run()
    deadline = time.monotonic() + 10
    while "barrier" not in (text := (tmp_path / "t.json").read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(text.rstrip().rstrip(",") + "]")[-1]["name"] == "barrier"
    timeline.close()


def test_an_unwritable_file_is_reported(tmp_path, caplog):
    with pytest.raises(UsageError, match="timeline: cannot write"):
        Timeline(str(tmp_path / "missing" / "t.json"), rank=0)
    recorder, timeline = traced("/dev/full")
    deadline = time.monotonic() + 10
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    Record(recorder, "barrier", "world", "world").run()  # continues
    timeline.close()
    assert "the timeline /dev/full ends early" in caplog.text
