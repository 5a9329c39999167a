"""Folders: checkpoints by their step, each complete or invisible, and the newest ones kept.

A checkpoint is written into a folder whose name begins with a dot, and renamed when all of it is on disk: a job that
is killed in the middle leaves none that is half there. All of this is done by rank 0, but for the files of others.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

INDEX = "index.json"
_NAME = re.compile(r"step-(\d+)")


def place(folder: Path, step: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return folder / f"step-{step:09d}"


def unfinished(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is being made."""
    return folder / f".step-{step:09d}.new"


def complete(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(name[1]) for name, path in found if name and (path / INDEX).is_file())


def begin(folder: Path, step: int) -> None:
    """Make an empty folder for a checkpoint, and remove what killed jobs have left. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)
    unfinished(folder, step).mkdir()


def finish(folder: Path, step: int, keep: int) -> None:
    """Let a checkpoint be seen, whose files are all written, and remove all but the newest `keep`. Raises OSError."""
    made, to = unfinished(folder, step), place(folder, step)
    _flush_folder(made)
    if to.exists():
        old = folder / f".step-{step:09d}.old"
        to.rename(old)
        made.rename(to)
        shutil.rmtree(old)
    else:
        made.rename(to)
    _flush_folder(folder)
    for old_step in [one for one in complete(folder) if one != step][: -(keep - 1) or None]:
        shutil.rmtree(place(folder, old_step))


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
