"""Error board: a folder in which failing ranks of a job agree which of them reports, so that one error is shown once.

The first rank that fails claims the report. The others write theirs here, as text, and print none. Errors that follow
from another rank's (PeerError) claim it a second later: by then the rank with the first cause has claimed it. The ranks
share only files: MPI, and the other ranks, may have failed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.config.settings import ranks_text

_CLAIM = "first"
_LOOK = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class ErrorBoard:
    """The board of one job. others: a folder for the reports of ranks whose errors differ from the first one."""

    folder: Path
    others: Path

    def claim(self, rank: int, message: str, patience: float = 0.0) -> bool:
        """Return whether this rank reports its error: the first does. patience: give others so many seconds.

        Returns True where the folder cannot be written: then every rank reports.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not (self.folder / _CLAIM).exists():
            time.sleep(_LOOK)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(rank, message)
        except OSError:
            return True
        try:
            with open(self.folder / _CLAIM, "x") as file:
                file.write(str(rank))
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def leave(self, rank: int, message: str, report: str) -> bool:
        """Keep the report of a silent rank, unless the first error is the same; return whether nothing is lost."""
        with suppress(OSError, ValueError, KeyError):
            first = int((self.folder / _CLAIM).read_text())
            if _are_same(self._messages()[first], _forms(message, rank)):
                return True
        try:
            self.others.mkdir(parents=True, exist_ok=True)
            (self.others / f"error-{rank}.txt").write_text(report)
        except OSError:
            return False
        return True

    def others_text(self, rank: int) -> str:
        """Return a line about the other ranks that failed; "" if there are none."""
        messages = self._messages()
        own = messages.pop(rank, [])
        same = sorted(other for other, forms in messages.items() if _are_same(forms, own))
        different = sorted(messages.keys() - same)
        parts = [f"the same error on {ranks_text(same)}"] if same else []
        if different:
            parts.append(f"other errors on {ranks_text(different)}, in {self.others}/error-RANK.txt")
        return "; ".join(parts)

    def keep_exit(self, rank: int, code: int, text: str) -> None:
        """Keep the exit code with which a rank leaves the program, and how, for ranks that may wait for it."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put(f"exit-{rank}", [code, text])

    def remove_exit(self, rank: int) -> None:
        """Remove what `keep_exit` kept, and empty folders: no rank has waited."""
        with suppress(OSError):
            (self.folder / f"exit-{rank}.json").unlink()
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def exits(self) -> tuple[int, str]:
        """Return the first rank's exit code that was kept, and a text about all of them; 0 and "" without any."""
        found = self._read_all("exit")
        by_text: dict[str, list[int]] = {}
        for rank, (_, text) in sorted(found.items()):
            by_text.setdefault(text, []).append(rank)
        text = "; ".join(f"{ranks_text(ranks)} {text}" for text, ranks in by_text.items())
        return (found[min(found)][0], text) if found else (0, "")

    def _write(self, rank: int, message: str) -> None:
        self._put(f"error-{rank}", _forms(message, rank))

    def _put(self, name: str, content: Any) -> None:
        new = self.folder / f".{name}"
        new.write_text(json.dumps(content))
        new.rename(self.folder / f"{name}.json")

    def _messages(self) -> dict[int, list[str]]:
        return self._read_all("error")

    def _read_all(self, kind: str) -> dict[int, Any]:
        found = {}
        for path in self.folder.glob(f"{kind}-*.json"):
            with suppress(OSError, ValueError):
                found[int(path.stem.removeprefix(f"{kind}-"))] = json.loads(path.read_text())
        return found


def _forms(message: str, rank: int) -> list[str]:
    """Return two forms of a message: without seconds and own numbers. Ranks with the same error share one form."""
    message = re.sub(r"\d+\.\d+ s\b", "T s", message)
    return [re.sub(r"this is rank \d+", "this is rank R", message), re.sub(rf"\brank {rank}\b", "rank R", message)]


def _are_same(one: Sequence[str], other: Sequence[str]) -> bool:
    return any(text == theirs for text, theirs in zip(one, other, strict=False))
