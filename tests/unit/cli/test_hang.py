"""`commlib trace hang` reads the dumps of ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from commlib.cli.app import app
from commlib.observe.dump import CallState, Dump, Frame, GroupState, ThreadState, Wait
from commlib.observe.hang_folder import HangFolder

CALL = "all_reduce of 4 x float32, op=sum, algorithm=auto"


@pytest.fixture
def folder(tmp_path):
    """Two ranks: rank 0 waits in its second call, and rank 1 is in its own code."""
    first, second = (CallState("all_reduce", CALL, number, 16, "ended") for number in (1, 2))
    stack = (Frame("train.py", 7, "step", "work()"),)
    late = Dump(
        1, 1, 2, "host", 11, 1e9, 5.0, (), (GroupState("world", "world", ((0, 1),), 1, (first,)),), (),
        (ThreadState("MainThread", 3, stack, 0, False),), (),
    )  # fmt: skip
    waits = (Wait(f"world: {CALL}", "world", 2, 6.0, None, 3),)
    groups = (GroupState("world", "world", ((0, 1),), 2, (first, replace(second, state="running"))),)
    hang = HangFolder.of(tmp_path, "abc", 1)
    hang.create()
    for dump in (replace(late, rank=0, process=10, waits=waits, groups=groups), late):
        hang.write(dump)
    return tmp_path


def trace(*arguments):
    return CliRunner().invoke(app, ["trace", "hang", *map(str, arguments)])


def test_the_diagnosis_and_a_rank_are_printed(folder):
    done = trace(folder, "--rank", 0)
    assert done.exit_code == 0, done.output
    assert "rank 1 is missing in world: " in done.output and "it is at train.py:7 in step: work()" in done.output
    assert f"    running call 2: {CALL}, 16 bytes" in done.output and "  thread MainThread\n" in done.output
    assert "rank 0 of 2, process 10 on host" in done.output and "rank 1 of 2" not in done.output
    assert "rank 0 of 2" not in trace(folder).output


def test_a_diagnosis_is_printed_as_json(folder):
    data = json.loads(trace(folder, "--json", "--rank", 1).stdout)
    assert data["folder"] == str(folder / "job-abc" / "hang-1") and data["size"] == 2
    assert [finding["kind"] for finding in data["findings"]] == ["missing"]
    assert data["dump"]["process"] == 11
    assert "dump" not in json.loads(trace(folder, "--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none",), "none is not a folder"),
        ((".", "--rank", "5"), "rank 5 has written nothing"),
        ((), "pass a folder with hangs; or a running job, with --now"),
    ],
)
def test_wrong_usage_is_an_error(folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    done = trace(*arguments)
    assert done.exit_code == 2 and words in done.output, done.output
