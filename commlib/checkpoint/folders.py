"""Checkpoint folders: one per step, each complete or invisible; only the newest are kept.

A checkpoint is written into a folder whose name begins with a dot, and renamed once all of it is on disk, so a killed
job leaves no incomplete one. Rank 0 does all of this; the other ranks only write their files.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from commlib.errors import CommlibError

INDEX = "index.json"
_LOCK = "lock"
_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return folder / f"step-{step:09d}"


def unfinished_path(folder: Path, step: int) -> Path:
    """Return the folder of an unfinished checkpoint."""
    return folder / f".step-{step:09d}.new"


def steps(folder: Path) -> list[int]:
    """Return the steps of all visible checkpoints, ascending, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(int(name[1]) for path in folder.iterdir() if (name := _NAME.fullmatch(path.name)))


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending."""
    return [step for step in steps(folder) if (checkpoint_path(folder, step) / INDEX).is_file()]


@contextmanager
def create_checkpoint(folder: Path, step: int) -> Iterator[None]:
    """Create and lock an empty folder for a checkpoint during the block; remove leftovers of killed jobs.

    Raises CommlibError if another job is saving into `folder`, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    restore_replaced(folder)
    for left in sorted(folder.glob(".step-*")):
        with suppress(FileNotFoundError), open(left / _LOCK, "r+b") as lock:
            _lock(lock, left.name)
        shutil.rmtree(left)
    unfinished = unfinished_path(folder, step)
    unfinished.mkdir()
    with open(unfinished / _LOCK, "w+b") as lock:
        _lock(lock, unfinished.name)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # forked children hold the lock too


def restore_replaced(folder: Path) -> None:
    """Restore a checkpoint that a killed job was replacing. Raises OSError."""
    for old in sorted(folder.glob(".step-*.old")) if folder.is_dir() else ():
        step = int(old.name.split("-")[1].split(".")[0])
        to, unfinished = checkpoint_path(folder, step), unfinished_path(folder, step)
        if not to.exists():
            is_whole = (unfinished / INDEX).is_file()  # the index is written last
            (unfinished if is_whole else old).rename(to)
            (to / _LOCK).unlink(missing_ok=True)


def finish(folder: Path, step: int, keep: int, damaged: Collection[int] = ()) -> None:
    """Make a completely written checkpoint visible, and remove all except the newest `keep`. Raises OSError.

    damaged: steps of damaged checkpoints, which are neither counted nor removed.
    """
    unfinished, to = unfinished_path(folder, step), checkpoint_path(folder, step)
    _flush_folder(unfinished)
    if to.exists():
        old = folder / f".step-{step:09d}.old"
        to.rename(old)
        unfinished.rename(to)
        shutil.rmtree(old, ignore_errors=True)
    else:
        unfinished.rename(to)
    (to / _LOCK).unlink()
    _flush_folder(folder)
    others = [one for one in complete_steps(folder) if one != step and one not in damaged]
    for old_step in others[: -(keep - 1) or None]:
        discarded = folder / f".step-{old_step:09d}.gone"  # hides it while it is removed
        checkpoint_path(folder, old_step).rename(discarded)
        shutil.rmtree(discarded, ignore_errors=True)


def _lock(file: BinaryIO, name: str) -> None:
    """Lock a file for this job, if the file system can. Raises CommlibError if another job holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommlibError(f"another job is saving into this folder, {name}: give each job a separate folder") from None
    except OSError:
        pass


@contextmanager
def open_flushed(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it is on disk at the end of the block. Raises OSError."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
