"""Hang folder: the files that the ranks of a job write when it hangs, and how to read them.

Layout: FOLDER/job-TOKEN/hang-NUMBER/rank-RANK.json, and a `diagnosis.txt` next to them. The folder of a hang is also
the signal between ranks: once it exists, all of them write a dump. Each job has a unique token, so several jobs may
share one FOLDER.
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
    """The folder of one hang. Its methods raise OSError."""

    path: Path

    @classmethod
    def of(cls, folder: str | os.PathLike[str], token: str, number: int) -> HangFolder:
        """Return the folder for one hang of a job."""
        return cls(Path(folder) / f"job-{token}" / f"hang-{number}")

    def exists(self) -> bool:
        """Return whether a rank has requested dumps."""
        return self.path.is_dir()

    def create(self) -> None:
        """Request dumps from all ranks."""
        self.path.mkdir(parents=True, exist_ok=True)

    def write(self, dump: Dump) -> None:
        """Write a rank's dump atomically."""
        temporary = self.path / f".rank-{dump.rank}.{dump.process}"
        try:
            temporary.write_text(dump.to_json())
            os.replace(temporary, self.path / f"rank-{dump.rank}.json")
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def ranks(self) -> set[int]:
        """Return the ranks that have written a dump."""
        return {rank for rank, _ in self._files()}

    def read(self) -> list[Dump]:
        """Return all dumps, by rank. Raises UsageError for a file that is not a dump."""
        return [Dump.from_json(path.read_text(), str(path)) for _, path in sorted(self._files())]

    def _files(self) -> Iterator[tuple[int, Path]]:
        for path in self.path.glob("rank-*.json"):
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                yield int(number), path

    @property
    def is_diagnosed(self) -> bool:
        """Whether a rank has written the diagnosis."""
        return (self.path / _DIAGNOSIS).exists()

    def claim(self, diagnosis: str) -> bool:
        """Write the diagnosis unless another rank has; return whether this rank was first."""
        try:
            with open(self.path / _DIAGNOSIS, "x") as file:
                file.write(f"{diagnosis}\n")
        except FileExistsError:
            return False
        return True

    @property
    def has_ended(self) -> bool:
        """Whether a wait from a dump has ended since."""
        return (self.path / _ENDED).exists()

    def end(self) -> bool:
        """Mark that a wait from a dump has ended; return whether this rank is the first to do so."""
        try:
            (self.path / _ENDED).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def find_hangs(folder: str | os.PathLike[str]) -> list[HangFolder]:
    """Return the hangs in a folder, or in the folders of its jobs, the latest last. Raises UsageError."""
    path = Path(folder)
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: pass the folder named in the warning about the hang")
    paths = [path, *path.glob("hang-*"), *path.glob("job-*/hang-*")]
    hangs = [hang for hang in map(HangFolder, paths) if hang.ranks()]
    if not hangs:
        raise UsageError(f"{path}: no dump found (expected rank-0.json and others, here or in job-*/hang-*)")
    return sorted(hangs, key=lambda hang: max(file.stat().st_mtime_ns for file in hang.path.glob("rank-*.json")))
