"""Checkpoints are there as a whole or not at all, and hold what ranks have in common once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.checkpoint import Checkpoint, folders
from commlib.checkpoint.checkpoint import Part, first_with, writer_for
from commlib.errors import CommlibError, UsageError
from tests.loopback import run


class Cell:
    """A value that can be saved."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def part(self, **options: Any) -> Part:
        return Part(lambda: {"value": self.value}, lambda saved: setattr(self, "value", saved["value"]), **options)


def saved(folder: Path, size: int, step: int, *, own: Any = lambda rank: rank, keep: int = 2) -> None:
    def rank(comm: Any) -> None:
        parts = {"alike": Cell(7).part(), "own": Cell(own(comm.rank)).part()}
        Checkpoint(folder, parts, keep=keep, comm=comm).save(step)

    run(size, rank)


def resumed(folder: Path, size: int, **options: Any) -> list[tuple[int, Any, Any]]:
    def rank(comm: Any) -> tuple[int, Any, Any]:
        alike, own = Cell(None), Cell(None)
        step = Checkpoint(folder, {"alike": alike.part(), "own": own.part(**options)}, comm=comm).resume()
        return step, alike.value, own.value

    return run(size, rank)


def files(folder: Path) -> dict[str, set[str]]:
    return {one.name: {file.name for file in one.iterdir()} for one in folder.iterdir()}


def test_what_ranks_hold_alike_is_written_once(tmp_path: Path) -> None:
    saved(tmp_path, 3, 5, own=lambda rank: rank // 2)
    assert files(tmp_path) == {"step-000000005": {"index.json", "alike.0.npz", "own.0.npz", "own.2.npz"}}
    assert resumed(tmp_path, 3) == [(5, 7, 0), (5, 7, 0), (5, 7, 1)]


def test_the_newest_stay_and_are_taken_up(tmp_path: Path) -> None:
    assert resumed(tmp_path / "missing", 2) == [(0, None, None)] * 2
    for step in (1, 10, 9):
        saved(tmp_path, 2, step)
    assert sorted(files(tmp_path)) == ["step-000000009", "step-000000010"]
    assert resumed(tmp_path, 2) == [(10, 7, 0), (10, 7, 1)]
    saved(tmp_path, 2, 11, keep=1)
    assert sorted(files(tmp_path)) == ["step-000000011"]
    saved(tmp_path, 2, 11, own=lambda rank: 5)  # again, after a resume without a step
    assert resumed(tmp_path, 2) == [(11, 7, 5)] * 2


def test_what_a_killed_job_left_is_neither_seen_nor_kept(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3)
    folders.begin(tmp_path, 4)
    (folders.unfinished(tmp_path, 4) / "own.0.npz").write_bytes(b"half")
    assert resumed(tmp_path, 2)[0][0] == 3
    saved(tmp_path, 2, 6)
    assert sorted(files(tmp_path)) == ["step-000000003", "step-000000006"]


def test_an_error_of_one_rank_is_that_of_all_and_nothing_is_there(tmp_path: Path) -> None:
    def rank(comm: Any) -> str:
        def state() -> Any:
            if comm.rank == 1:
                raise OSError(28, "No space left on device")
            return 0

        with pytest.raises(CommlibError) as error:
            Checkpoint(tmp_path, {"x": Part(state, print)}, comm=comm).save(8)
        return str(error.value)

    said = f"checkpoint of step 8 in {tmp_path}: OSError: [Errno 28] No space left on device (rank 1)"
    assert run(3, rank) == [said] * 3
    assert folders.complete(tmp_path) == []


def test_ranks_that_save_different_steps(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"ranks save different steps, 0, 1"):
            Checkpoint(tmp_path, {"x": Cell(0).part()}, comm=comm).save(comm.rank)

    run(2, rank)


def test_another_number_of_ranks_resumes_what_was_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2, 4)
    with pytest.raises(
        UsageError, match=r"each of 2 ranks has saved its own own, and these are 3: start .* on 2 ranks"
    ):
        resumed(tmp_path, 3)
    assert resumed(tmp_path, 3, is_needed=False) == [(4, 7, None)] * 3
    assert "saved by another number of ranks, each for itself, and not loaded: own" in caplog.text
    saved(tmp_path, 3, 5, own=lambda rank: 1)
    assert resumed(tmp_path, 1) == [(5, 7, 1)]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / "step-000000004" / "own.1.npz").write_bytes(b"?" * 100)
    with pytest.raises(CommlibError, match=r"checkpoint of step 4 in .*: \w+: .* \(rank 1\)"):
        resumed(tmp_path, 2)


def test_what_was_not_saved_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, 4)

    def rank(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"it has no other, only alike, own \(rank 0\)"):
            Checkpoint(tmp_path, {"other": Cell(0).part()}, comm=comm).resume()

    run(1, rank)


def test_who_writes_and_who_reads() -> None:
    everyone = [{"a": "x", "b": "y"}, {"a": "x", "b": "z"}, {"a": "w"}]
    writers = first_with(everyone)
    assert writers == {"a": [0, 0, 2], "b": [0, 1, None]}
    index = json.loads(json.dumps({"writers": writers}))
    assert [writer_for(index, "a", rank, 3) for rank in range(3)] == [0, 0, 2]
    assert writer_for(index, "a", 0, 2) is None
    with pytest.raises(UsageError, match="rank 2 has saved no b"):
        writer_for(index, "b", 2, 3)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"parts": {}}])
def test_wrong_arguments(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected something to save and keep >= 1"):
        Checkpoint(tmp_path, **{"parts": {"x": Cell(0).part()}, **wrong})


def test_bits_are_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))

    def rank(comm: Any) -> None:
        cell = Cell(x)
        checkpoint = Checkpoint(tmp_path, {"x": cell.part()}, comm=comm)
        checkpoint.save(1)
        cell.value = None
        assert checkpoint.resume() == 1
        assert cell.value.array().tobytes() == x.tobytes()

    run(2, rank)
