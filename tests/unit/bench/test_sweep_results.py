"""The file of a sweep: read after a kill at any byte, written by one sweep at a time."""

from __future__ import annotations

import json

import pytest

from commlib.bench.options import BenchOptionsError
from commlib.bench.sweep.environment import differences, launcher_of
from commlib.bench.sweep.results import FORMAT, ResultsWriter, parse, read

HEADER = {"kind": "environment", "number": 0, "format": FORMAT, "plan": {}, "facts": {"mpi": "x"}}
CASE = {"kind": "case", "key": "1x2 barrier", "status": "ok"}
BEGUN = {"kind": "begun", "key": "1x2 barrier"}


def text(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_a_truncated_file_is_continued(tmp_path):
    path = tmp_path / "results.jsonl"
    whole = text(HEADER, BEGUN, CASE)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with ResultsWriter(path) as writer:
            saved = whole[:cut].count(b"\n")
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:saved])
            assert len(writer.results.environments) == min(saved, 1)
            writer.add({**CASE, "key": "another"})
        assert "another" in parse(path.read_bytes(), "x").cases


def test_beginnings_count_until_the_case_ends():
    assert parse(text(HEADER, BEGUN, BEGUN), "x").begun == {BEGUN["key"]: 2}
    assert not parse(text(HEADER, BEGUN, BEGUN, CASE), "x").begun


def test_the_last_line_of_a_case_counts():
    assert parse(text(HEADER, CASE, {**CASE, "status": "failed"}), "x").cases[CASE["key"]]["status"] == "failed"


def test_a_file_without_results_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    wrong = {
        b"{\n": "line 1: not a line of a sweep's results",
        b"[]\n": "line 1: not a line of a sweep's results",
        text(HEADER, {"kind": "song"}): "line 2: kind 'song' of line is unknown",
        text({**HEADER, "format": 99}): "format 99 of results, expected 1",
        text(CASE): "found no line with the environment",
        b"": "is empty",
    }
    for data, message in wrong.items():
        path.write_bytes(data)
        with pytest.raises(BenchOptionsError, match=message):
            read(path)
    with pytest.raises(BenchOptionsError, match="cannot be read"):
        read(tmp_path / "none")
    with pytest.raises(BenchOptionsError, match="cannot write this file"):
        ResultsWriter(path / "below.jsonl")


def test_only_one_sweep_writes_a_file(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultsWriter(path), pytest.raises(BenchOptionsError, match="another sweep is writing to it"):
        ResultsWriter(path)
    with ResultsWriter(path) as writer:
        writer.add(HEADER)
    assert read(path).environments == [HEADER]


def test_differences_are_reported_except_expected_ones():
    before = {"date": "1", "load": 1.0, "mpi": "A", "hosts": ["a", "a"], "versions": {"numpy": "1", "torch": "2"}}
    now = {"date": "2", "load": 2.0, "mpi": "A", "hosts": ["b"], "versions": {"numpy": "2"}}
    assert differences(before, now) == [
        "hosts: a before, b now",
        "versions.numpy: 1 before, 2 now",
        "versions.torch: 2 before, nothing now",
    ]
    assert differences(before, before) == []


def test_launchers_are_recorded():
    assert launcher_of({"OMPI_COMM_WORLD_RANK": "0", "SLURM_STEP_ID": "0"}) == "mpirun"
    assert launcher_of({}) == "no launcher"
