"""Folders: checkpoints by their step, each complete or invisible, and the newest ones kept.

A checkpoint is written into a folder whose name begins with a dot, and renamed when all of it is on disk: a job that
is killed in the middle leaves none that is half there. All of this is done by rank 0, but for the files of others.
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


def place(folder: Path, step: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return folder / f"step-{step:09d}"


def unfinished(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is being made."""
    return folder / f".step-{step:09d}.new"


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints that can be seen, ascending, whether or not they are complete."""
    if not folder.is_dir():
        return []
    return sorted(int(name[1]) for path in folder.iterdir() if (name := _NAME.fullmatch(path.name)))


def complete(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending."""
    return [step for step in steps(folder) if (place(folder, step) / INDEX).is_file()]


@contextmanager
def making(folder: Path, step: int) -> Iterator[None]:
    """Make an empty folder for a checkpoint, which is this job's within; remove what killed jobs have left.

    Raises CommlibError if another job is making one there, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put_back(folder)
    for left in sorted(folder.glob(".step-*")):
        with suppress(FileNotFoundError), open(left / _LOCK, "r+b") as lock:
            _lock(lock, left.name)
        shutil.rmtree(left)
    made = unfinished(folder, step)
    made.mkdir()
    with open(made / _LOCK, "w+b") as lock:
        _lock(lock, made.name)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # of processes that were forked meanwhile, too


def put_back(folder: Path) -> None:
    """Let a checkpoint be seen again that a job was about to replace when it was killed. Raises OSError."""
    for old in sorted(folder.glob(".step-*.old")) if folder.is_dir() else ():
        step = int(old.name.split("-")[1].split(".")[0])
        to, made = place(folder, step), unfinished(folder, step)
        if not to.exists():
            is_whole = (made / INDEX).is_file()  # it is written last
            (made if is_whole else old).rename(to)
            (to / _LOCK).unlink(missing_ok=True)


def finish(folder: Path, step: int, keep: int, damaged: Collection[int] = ()) -> None:
    """Let a checkpoint be seen, whose files are all written, and remove all but the newest `keep`. Raises OSError.

    damaged: steps that count for nothing, and stay.
    """
    made, to = unfinished(folder, step), place(folder, step)
    _flush_folder(made)
    if to.exists():
        old = folder / f".step-{step:09d}.old"
        to.rename(old)
        made.rename(to)
        shutil.rmtree(old, ignore_errors=True)
    else:
        made.rename(to)
    (to / _LOCK).unlink()
    _flush_folder(folder)
    others = [one for one in complete(folder) if one != step and one not in damaged]
    for old_step in others[: -(keep - 1) or None]:
        gone = folder / f".step-{old_step:09d}.gone"  # one that is half removed is not to be seen
        place(folder, old_step).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _lock(file: BinaryIO, name: str) -> None:
    """Lock a file for this job, where files can be locked. Raises CommlibError if another one has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommlibError(
            f"another job is saving into this folder, {name}: give each job a folder of its own"
        ) from None
    except OSError:
        pass


@contextmanager
def flushed(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write; it is on disk afterwards. Raises OSError."""
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
