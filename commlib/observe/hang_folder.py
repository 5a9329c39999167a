"""Hang folder: where the ranks of a job write when it hangs, and how that is read.

FOLDER/job-TOKEN/hang-NUMBER/rank-RANK.json, with a `diagnosis.txt` beside them. A hang's folder is also how ranks tell
each other: once it is there, all of them write. A job's token is its own, so several jobs may use one FOLDER.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from commlib.errors import UsageError
from commlib.observe.dump import Dump

_DIAGNOSIS, _ENDED = "diagnosis.txt", "ended"


@dataclass(frozen=True, slots=True)
class HangFolder:
    """The folder of one hang. Methods raise OSError."""

    path: Path

    @classmethod
    def of(cls, folder: str | os.PathLike[str], token: str, number: int) -> HangFolder:
        """Return that of a job's hang."""
        return cls(Path(folder) / f"job-{token}" / f"hang-{number}")

    def exists(self) -> bool:
        """Return whether some rank has called for dumps."""
        return self.path.is_dir()

    def create(self) -> None:
        """Call for the dumps of all ranks."""
        self.path.mkdir(parents=True, exist_ok=True)

    def write(self, dump: Dump) -> None:
        """Write a rank's dump, whole or not at all."""
        beside = self.path / f".rank-{dump.rank}.{dump.process}"
        try:
            beside.write_text(dump.to_json())
            os.replace(beside, self.path / f"rank-{dump.rank}.json")
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise

    def ranks(self) -> set[int]:
        """Return who has written."""
        return {rank for rank, _ in self._files()}

    def read(self) -> list[Dump]:
        """Return all dumps, by rank. Raises UsageError for a file that is none."""
        return [Dump.from_json(path.read_text(), str(path)) for _, path in sorted(self._files())]

    def _files(self) -> Iterator[tuple[int, Path]]:
        for path in self.path.glob("rank-*.json"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                yield int(number), path

    @property
    def is_diagnosed(self) -> bool:
        """Whether a rank has written its diagnosis."""
        return (self.path / _DIAGNOSIS).exists()

    def claim(self, diagnosis: str) -> bool:
        """Write the diagnosis, unless another rank has; return whether this one was first."""
        try:
            with open(self.path / _DIAGNOSIS, "x") as file:
                file.write(f"{diagnosis}\n")
        except FileExistsError:
            return False
        return True

    @property
    def has_ended(self) -> bool:
        """Whether a wait that was written down has ended since."""
        return (self.path / _ENDED).exists()

    def end(self) -> bool:
        """Note that a wait that was written down has ended; return whether this rank is the first to do so."""
        try:
            (self.path / _ENDED).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def find_hangs(folder: str | os.PathLike[str]) -> list[HangFolder]:
    """Return the hangs in a folder: itself, or those of the jobs in it, the latest last. Raises UsageError for none."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"{path} is no folder: give the one that the warning about the hang names")
    paths = [path, *path.glob("hang-*"), *path.glob("job-*/hang-*")]
    hangs = [hang for hang in map(HangFolder, paths) if hang.ranks()]
    if not hangs:
        raise UsageError(f"{path}: no rank has written a dump there (rank-0.json, in it or in job-*/hang-*)")
    return sorted(hangs, key=lambda hang: max(file.stat().st_mtime_ns for file in hang.path.glob("rank-*.json")))
