"""Marks other than operations: waits of threads, packing, codecs, steps; written only with a timeline."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from commlib.observe.clocks import now_on_both
from commlib.observe.journal import Journal, journal_of
from commlib.observe.recorder import Record, Recorder
from commlib.observe.timeline import Timeline
from tests.bodies.loopback import run


def traced(path):
    recorder, timeline = Recorder(), Timeline(str(path), rank=0)
    recorder.subscribe(timeline.read)
    recorder.trace = timeline.take
    journal = Journal("world", "key of the world")
    journal.recorder = recorder
    return journal, timeline


def read(path):
    return [event for event in json.loads(path.read_text()) if event["ph"] != "M"]


def test_a_span_has_a_begin_an_end_and_its_error(tmp_path):
    journal, timeline = traced(tmp_path / "t.json")
    with journal.span("codec", "encode", codec="int8"):
        time.sleep(0.002)
    with pytest.raises(ValueError, match="bad"), journal.span("pack", "unpack"):
        raise ValueError("bad")
    journal.step("user")
    timeline.close()
    begin, end, *failed, step = read(tmp_path / "t.json")
    assert (begin["ph"], begin["name"], begin["cat"]) == ("B", "encode", "codec") and end["ph"] == "E"
    assert begin["args"] == {"calls": "key of the world", "codec": "int8"} and end["ts"] - begin["ts"] > 1900
    assert failed[1]["args"] == {"error": "ValueError: bad"} and failed[0]["tid"] != begin["tid"]
    assert (step["ph"], step["cat"], step["args"]) == ("i", "step", {"by": "user"})


def test_marks_are_written_only_with_a_timeline():
    journal = Journal("world")
    assert journal.span("codec", "encode") is journal.span("pack", "pack")  # a shared span that does nothing
    journal.recorder = recorder = Recorder()
    with journal.span("codec", "encode"):
        journal.step("user")
    record = Record(recorder, "all_reduce of 1", "world", "world")
    record.waited(record.waits())
    assert recorder.events() == []
    assert journal_of(object()).recorder is None


def test_a_timeline_may_end_within_a_span(tmp_path):
    journal, timeline = traced(tmp_path / "t.json")
    assert journal.recorder is not None
    with journal.span("codec", "encode"):
        journal.recorder.trace = None
        timeline.close()
    assert [event["ph"] for event in read(tmp_path / "t.json")] == ["B"]


def test_only_waits_of_the_program_are_exposed(tmp_path):
    def work(comm):
        x = np.ones(50_000, np.float32)
        comm.all_reduce(x)  # compiled
        comm.runtime.recording.start_timeline(str(tmp_path / "{rank}.json"), comm.rank)
        if comm.rank:
            time.sleep(0.05)
        comm.all_reduce_async(x).wait()
        comm.all_reduce(x)
        comm.runtime.recording.stop_timeline()

    run(2, work)
    events = read(tmp_path / "0.json")
    waits = [event for event in events if event.get("cat") == "wait"]
    assert [event["ph"] for event in waits] == ["b", "e"] and waits[1]["ts"] - waits[0]["ts"] > 30_000
    assert waits[0]["args"]["calls"] == "world" and waits[0]["args"]["sequence"] > 0
    ends = [event["args"] for event in events if event["ph"] == "E"]
    assert ends == [{}, {"exposed": True}]


def test_a_wait_that_fails_ends(tmp_path):
    def work(comm):
        comm.runtime.recording.start_timeline(str(tmp_path / "{rank}.json"), comm.rank)
        opened = time.monotonic() + 0.2
        blocked = comm.group.progress.start("gate", lambda: time.sleep(max(0, opened - time.monotonic())))
        with pytest.raises(Exception, match=r"not done after 0\.01 s"):
            blocked.wait(0.01)
        blocked.wait()
        comm.runtime.recording.stop_timeline()

    run(1, work)
    waits = [event["ph"] for event in read(tmp_path / "0.json") if event.get("cat") == "wait"]
    assert waits == ["b", "e", "b", "e"]


def test_both_clocks_are_read_at_one_moment():
    monotonic, wall = now_on_both()
    assert abs((time.time_ns() - time.monotonic_ns()) - (wall - monotonic)) < 50_000_000
