"""Input files of a trace: complete, truncated, empty, foreign, of several kinds."""

from __future__ import annotations

import gzip
import json
import random

import pytest

from commlib.errors import UsageError
from commlib.trace.files import COMMLIB, TENSORFLOW, TORCH, read, read_all
from commlib.trace.operations import read_activity
from commlib.trace.parse import parse
from tests.inputs.timelines import RankTimeline

TORCH_FACTS = {"schemaVersion": 1, "host_name": "here", "baseTimeNanoseconds": 1_700_000_000_000_000_000}


def timeline(path, rank=0, **options):
    recorded = RankTimeline(rank, **options)
    for number in range(1, 6):
        recorded.blocking("all_reduce", number, 10 * number, 10 * number + 1)
    return recorded.write(path)


def torch_trace(path, *, process=1000, rank=None, cut=None):
    event = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::add",
        "pid": process,
        "tid": process,
        "ts": 10_500.0,
        "dur": 5.0,
    }
    facts = TORCH_FACTS if rank is None else {**TORCH_FACTS, "distributedInfo": {"rank": rank}}
    text = json.dumps({**facts, "traceEvents": [event] * 20}, indent=1)
    path.write_text(text[:cut])
    return str(path)


def test_a_truncated_file_gives_its_complete_events(tmp_path):
    whole = (tmp_path / "t.json", timeline(tmp_path / "t.json"))[0].read_bytes()
    events, _, complete = parse(whole)
    assert complete
    for cut in random.Random(0).sample(range(2, len(whole) - 2), 60):
        some, _, is_whole = parse(whole[:cut])
        assert not is_whole and some == events[: len(some)]
        assert len(some) >= whole[:cut].count(b"},\n")
    squeezed = gzip.compress(whole)
    some, _, is_whole = parse(squeezed[: len(squeezed) // 2])
    assert not is_whole and 0 < len(some) < len(events) and some == events[: len(some)]
    assert parse(squeezed)[0] == events


def test_open_operations_end_with_the_file(tmp_path):
    recorded = RankTimeline(0)
    recorded.blocking("barrier", 1, 10, 5000)
    recorded.started("all_reduce", 2, 6000, 7000, 8000, waits=(6500, 8000))
    text = (tmp_path / "t.json", recorded.write(tmp_path / "t.json", end=False))[0].read_text().splitlines()
    (tmp_path / "t.json").write_text("\n".join(text[:-2]))  # without the end of the operation, and of the wait
    (trace,), _ = read_all([str(tmp_path / "t.json")])
    activity = read_activity(trace)
    first, second = activity.operations
    assert (first.error, second.error) == ("", "unfinished") and second.ended == activity.end == recorded.own(7000)
    (wait,) = activity.of("wait")
    assert (wait.key, wait.ended) == (("world", 2), activity.end)


@pytest.mark.parametrize("text", ["", "\n", "[", "[\n"])
def test_an_empty_file_is_skipped_and_reported(tmp_path, text):
    (tmp_path / "empty.json").write_text(text)
    names = [timeline(tmp_path / "t.json"), str(tmp_path / "empty.json")]
    traces, notes = read_all(names)
    assert [trace.rank for trace in traces] == [0] and len(notes) == 1 and "empty.json: is empty" in notes[0]
    with pytest.raises(UsageError, match="none of these files is a timeline of commlib"):
        read_all(names[1:])


@pytest.mark.parametrize(
    "data",
    [b"hello", b"{}", b"[1, 2]", b'{"traceEvents": 3}', b'[{"ph": "X", "ts": 1, "name": "of another program"}]',
     b"\0\1\2", b"\x1f\x8bnot gzip", b"\xff\xfe",
     b'{"traceEvents": [{"ph": "X", "ts": 5, "name": "ThreadpoolListener"}]}'],
)  # fmt: skip
def test_a_foreign_file_is_refused_by_name(tmp_path, data):
    (tmp_path / "foreign.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"foreign\.json.*expected a timeline of commlib"):
        read_all([timeline(tmp_path / "t.json"), str(tmp_path / "foreign.json")])


def test_missing_and_mismatched_files_are_errors(tmp_path):
    mine, other = timeline(tmp_path / "a.json", 3), timeline(tmp_path / "b.json", 3)
    with pytest.raises(UsageError, match=r"a\.json and .*b\.json are both of rank 3"):
        read_all([mine, other])
    with pytest.raises(UsageError, match=r"cannot read .*missing\.json: No such file"):
        read_all([mine, str(tmp_path / "missing.json")])
    with pytest.raises(UsageError, match="cannot read"):
        read_all([str(tmp_path)])
    both = json.loads((tmp_path / "a.json").read_text()) + [{**event, "pid": 4} for event in parse(b"[]")[0]]
    both += [{"ph": "i", "pid": 4, "ts": 1, "name": "x"}]
    (tmp_path / "merged.json").write_text(json.dumps(both))
    with pytest.raises(UsageError, match="has 2 ranks, expected 1: already merged"):
        read_all([str(tmp_path / "merged.json")])
    text = (tmp_path / "a.json").read_text().replace('"format": 1', '"format": 99')
    (tmp_path / "new.json").write_text(text)
    with pytest.raises(UsageError, match="has format 99"):
        read_all([str(tmp_path / "new.json")])


def test_a_profiles_rank_comes_from_process_contents_or_argument(tmp_path):
    names = [timeline(tmp_path / f"t{rank}.json", rank) for rank in range(2)]
    by_process = torch_trace(tmp_path / "a.json", process=1001)
    by_itself = torch_trace(tmp_path / "b.json", process=7, rank=1)
    unknown = torch_trace(tmp_path / "c.json", process=7)
    traces, _ = read_all([by_process, by_itself, f"0={unknown}", *names])
    assert [(trace.kind, trace.rank) for trace in traces] == [
        (COMMLIB, 0), (COMMLIB, 1), (TORCH, 1), (TORCH, 1), (TORCH, 0)
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"c\.json: its rank is unknown: pass it as RANK=FILE, such as 0="):
        read_all([unknown, *names])
    assert read_all([unknown, names[1]])[0][1].rank == 1
    with pytest.raises(UsageError, match="is of rank 5, which has no timeline"):
        read_all([f"5={unknown}", *names])
    cut = torch_trace(tmp_path / "d.json", process=1000, cut=-40)
    traces, notes = read_all([cut, *names])
    assert traces[-1].start == TORCH_FACTS["baseTimeNanoseconds"] and 0 < len(traces[-1].events) < 20
    assert any("d.json: ends early" in note for note in notes)


def varint(value):
    encoded = b""
    while value > 127:
        encoded, value = encoded + bytes([value & 127 | 128]), value >> 7
    return encoded + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


START = 1_700_000_000_000_000_000  # ns since 1970


def xplane(events, *, line_start=START, told=0):
    """Return a profile. line_start: what events count from; told: the start in another plane."""
    kind = field(1, 7) + field(2, field(1, 7) + field(2, b"MatMul") + field(5, b"more"))
    line = field(1, 3) + field(2, b"main") + field(3, line_start)
    for offset, length in events:
        line += field(4, field(1, 7) + field(2, offset) + field(3, length))
    planes = field(1, field(1, 1) + field(2, b"/host:CPU") + field(3, line) + field(4, kind) + field(6, b""))
    if told:
        stat = field(5, field(1, 2) + field(2, field(1, 2) + field(2, b"profile_start_time")))
        planes += field(1, field(2, b"Task Environment") + stat + field(6, field(1, 2) + field(3, told)))
    return planes + field(4, b"h")


@pytest.mark.parametrize("times", [{}, {"line_start": 0, "told": START}, {"told": START}])
def test_a_profile_of_tensorflow_is_read(tmp_path, times):
    data = xplane([(2_000_000, 500_000), (10_000_000_000, 1_000_000)], **times)
    (tmp_path / "vm.xplane.pb").write_bytes(data)
    trace = read(str(tmp_path / "vm.xplane.pb"))
    assert trace is not None and trace.kind == TENSORFLOW
    slices = [event for event in trace.events if event["ph"] == "X"]
    assert trace.start == trace.wall == START
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        ("MatMul", 2.0, 0.5), ("MatMul", 10_000.0, 1.0)
    ]  # fmt: skip
    assert {event["args"]["name"] for event in trace.events if event["ph"] == "M"} == {"/host:CPU", "main"}
    for bad in (b"hello", data[:40], b"\x13" * 30, xplane([(1, 1)], line_start=5)):
        (tmp_path / "bad.xplane.pb").write_bytes(bad)
        with pytest.raises(UsageError, match=r"bad\.xplane\.pb"):
            read(str(tmp_path / "bad.xplane.pb"))
