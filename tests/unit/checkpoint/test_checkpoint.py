"""Checkpoints are complete or absent, and store state that ranks share once."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.checkpoint import Checkpoint, folders
from commlib.checkpoint.checkpoint import CheckpointPart, find_writer, find_writers
from commlib.errors import CommlibError, UsageError
from tests.bodies.loopback import run


class Cell:
    """A value that can be saved."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def part(self, **options: Any) -> CheckpointPart:
        return CheckpointPart(
            lambda: {"value": self.value}, lambda saved: setattr(self, "value", saved["value"]), **options
        )


def saved(folder: Path, size: int, step: int, *, own: Any = lambda rank: rank, keep: int = 2) -> None:
    def rank(comm: Any) -> None:
        parts = {"alike": Cell(7).part(), "own": Cell(own(comm.rank)).part()}
        Checkpoint(folder, parts, keep=keep, ranks=comm).save(step)

    run(size, rank)


def resumed(folder: Path, size: int, **options: Any) -> list[tuple[int, Any, Any]]:
    def rank(comm: Any) -> tuple[int, Any, Any]:
        alike, own = Cell(None), Cell(None)
        step = Checkpoint(folder, {"alike": alike.part(), "own": own.part(**options)}, ranks=comm).resume()
        return step, alike.value, own.value

    return run(size, rank)


def files(folder: Path) -> dict[str, set[str]]:
    return {one.name: {file.name for file in one.iterdir()} for one in folder.iterdir()}


def arrays(**arrays: Any) -> bytes:
    """Return the bytes of a file of numpy's."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_state_equal_on_all_ranks_is_written_once(tmp_path: Path) -> None:
    saved(tmp_path, 3, 5, own=lambda rank: rank // 2)
    assert files(tmp_path) == {"step-000000005": {"index.json", "alike.0.npz", "own.0.npz", "own.2.npz"}}
    assert resumed(tmp_path, 3) == [(5, 7, 0), (5, 7, 0), (5, 7, 1)]


def test_the_newest_checkpoints_stay_and_are_resumed(tmp_path: Path) -> None:
    assert resumed(tmp_path / "missing", 2) == [(0, None, None)] * 2
    for step in (1, 10, 9):
        saved(tmp_path, 2, step)
    assert sorted(files(tmp_path)) == ["step-000000009", "step-000000010"]
    assert resumed(tmp_path, 2) == [(10, 7, 0), (10, 7, 1)]
    saved(tmp_path, 2, 11, keep=1)
    assert sorted(files(tmp_path)) == ["step-000000011"]
    saved(tmp_path, 2, 11, own=lambda rank: 5)  # again, after a resume without a step
    assert resumed(tmp_path, 2) == [(11, 7, 5)] * 2


def test_leftovers_of_a_killed_job_are_ignored_and_removed(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3)
    with folders.create_checkpoint(tmp_path, 4):
        (folders.unfinished_path(tmp_path, 4) / "own.0.npz").write_bytes(b"half")
    assert resumed(tmp_path, 2)[0][0] == 3
    saved(tmp_path, 2, 6)
    assert sorted(files(tmp_path)) == ["step-000000003", "step-000000006"]


def test_an_error_of_one_rank_fails_all_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    def rank(comm: Any) -> str:
        def state() -> Any:
            if comm.rank == 1:
                raise OSError(28, "No space left on device")
            return 0

        with pytest.raises(CommlibError) as error:
            Checkpoint(tmp_path, {"x": CheckpointPart(state, print)}, ranks=comm).save(8)
        return str(error.value)

    message = f"checkpoint of step 8 in {tmp_path}: OSError: [Errno 28] No space left on device (rank 1)"
    assert run(3, rank) == [message] * 3
    assert folders.complete_steps(tmp_path) == []


def test_different_steps_are_refused(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"ranks save different steps, 0, 1"):
            Checkpoint(tmp_path, {"x": Cell(0).part()}, ranks=comm).save(comm.rank)

    run(2, rank)


def test_another_number_of_ranks_resumes_shared_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2, 4)
    with pytest.raises(
        UsageError, match=r"each of 2 ranks saved a different own, but this job has 3 ranks: start it on 2 ranks"
    ):
        resumed(tmp_path, 3)
    assert resumed(tmp_path, 3, is_needed=False) == [(4, 7, None)] * 3
    assert "saved by another number of ranks, different on each, and not loaded: own" in caplog.text
    saved(tmp_path, 3, 5, own=lambda rank: 1)
    assert resumed(tmp_path, 1) == [(5, 7, 1)]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"?" * 100, "it is not an npz file, or not complete"),
        (arrays(other=np.zeros(2)), "'layout is not a file in the archive'"),
        (arrays(layout=np.array([{}], object)), "it has Python objects, which commlib neither writes nor loads"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, problem: str, tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / "step-000000004" / "own.1.npz").write_bytes(content)
    message = rf"step 4 in .*: own\.1\.npz is not a file written by Checkpoint: {problem} \(rank 1\)"
    with pytest.raises(CommlibError, match=message):
        resumed(tmp_path, 2)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, 4)

    def rank(comm: Any) -> None:
        with pytest.raises(UsageError, match=r"the checkpoint has no other, only alike, own \(rank 0\)"):
            Checkpoint(tmp_path, {"other": Cell(0).part()}, ranks=comm).resume()

    run(1, rank)


def test_ranks_share_writing_and_reading() -> None:
    everyone = [{"a": "x", "b": "y"}, {"a": "x", "b": "z"}, {"a": "w"}]
    writers = find_writers(everyone)
    assert writers == {"a": [0, 0, 2], "b": [0, 1, None]}
    index = json.loads(json.dumps({"writers": writers}))
    assert [find_writer(index, "a", rank, 3) for rank in range(3)] == [0, 0, 2]
    assert find_writer(index, "a", 0, 2) is None
    with pytest.raises(UsageError, match="rank 2 saved no b"):
        find_writer(index, "b", 2, 3)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"parts": {}}])
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected something to save and keep >= 1"):
        Checkpoint(tmp_path, **{"parts": {"x": Cell(0).part()}, **wrong})


def test_resumed_state_has_the_same_bits(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))

    def rank(comm: Any) -> None:
        cell = Cell(x)
        checkpoint = Checkpoint(tmp_path, {"x": cell.part()}, ranks=comm)
        checkpoint.save(1)
        cell.value = None
        assert checkpoint.resume() == 1
        assert cell.value.array().tobytes() == x.tobytes()

    run(2, rank)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 255
    path.write_bytes(data)


DAMAGE: dict[str, Any] = {
    "cut": lambda folder: cut(folder / "own.1.npz"),
    "flip": lambda folder: flip(folder / "own.1.npz"),
    "missing": lambda folder: (folder / "own.1.npz").unlink(),
    "garbage": lambda folder: (folder / "alike.0.npz").write_bytes(b"?" * 100),
    "another's": lambda folder: shutil.copy(folder / "own.0.npz", folder / "own.1.npz"),
    "index": lambda folder: cut(folder / "index.json"),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_all_ranks_resume_the_last_complete_checkpoint(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A truncated file ended the job at every restart; an empty folder was skipped."""
    for step in (2, 4):
        saved(tmp_path, 2, step, own=lambda rank, step=step: 10 * step + rank)
    DAMAGE[kind](tmp_path / "step-000000004")
    assert resumed(tmp_path, 2) == [(2, 7, 20), (2, 7, 21)]
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"checkpoint of step 4 in {tmp_path}: " in message and "(rank" in message
    assert message.endswith("so this checkpoint is damaged, and the job resumes from step 2")
    shutil.rmtree(tmp_path / "step-000000002")
    with pytest.raises(CommlibError, match=r"no checkpoint is intact: checkpoint of step 4 .*Remove them"):
        resumed(tmp_path, 2)


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (2, 4):
        saved(tmp_path, 1, step)
    cut(tmp_path / "step-000000004" / "own.0.npz")

    def rank(comm: Any) -> None:
        checkpoint = Checkpoint(tmp_path, {"own": Cell(0).part()}, ranks=comm)
        assert checkpoint.resume() == 2
        checkpoint.save(3)

    run(1, rank)
    assert sorted(files(tmp_path)) == [f"step-00000000{step}" for step in (2, 3, 4)]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_kill_during_replacement_loses_no_checkpoint(tmp_path: Path, is_written: bool) -> None:
    """The old one had lost its name, the new one had none yet, and the next save removed both."""
    saved(tmp_path, 1, 5, own=lambda rank: "old")
    (tmp_path / "step-000000005").rename(tmp_path / ".step-000000005.old")
    if is_written:
        saved(tmp_path / "elsewhere", 1, 5, own=lambda rank: "new")
        (tmp_path / "elsewhere" / "step-000000005").rename(tmp_path / ".step-000000005.new")
    else:
        folders.unfinished_path(tmp_path, 5).mkdir()
    assert resumed(tmp_path, 1) == [(5, 7, "new" if is_written else "old")]


def test_two_jobs_cannot_save_into_one_folder(tmp_path: Path) -> None:
    """One removed what the other was writing; with bad luck a checkpoint had parts of both."""
    with (
        folders.create_checkpoint(tmp_path, 5),
        pytest.raises(CommlibError, match=r"another job is saving .* a separate folder"),
    ):
        saved(tmp_path, 2, 6)
    saved(tmp_path, 2, 6)
    assert resumed(tmp_path, 2)[0][0] == 6


def test_saving_without_resuming_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2, 50)
    assert not caplog.records
    saved(tmp_path, 2, 3)
    assert f"checkpoint of step 3 in {tmp_path}: jobs resume from the newer checkpoint of step 50" in caplog.text
    assert resumed(tmp_path, 2)[0][0] == 50


def test_a_checkpoint_prints_its_parts_and_folder(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"own": Cell(1).part(), "alike": Cell(2).part()}, keep=3)
    assert repr(checkpoint) == f"<Checkpoint of alike, own in {tmp_path}, the last 3>"


@pytest.mark.parametrize("step", [-1, "a", 1.5, None, True])
def test_a_step_that_no_job_would_find_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match=f"step must be an integer of at least 0, got {step!r}"):
        saved(tmp_path, 2, step)
    assert not files(tmp_path)
    saved(tmp_path, 2, np.int64(0))  # type: ignore[arg-type]
    assert resumed(tmp_path, 2)[0][0] == 0
