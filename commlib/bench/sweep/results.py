"""Results: a file of JSON lines to which a sweep adds a line as each case ends, and which it reads to go on.

    {"kind": "environment", "number": 0, "format": 1, "plan": {...}, "facts": {...}}     where what follows was measured
    {"kind": "begun", "key": "2x4 all_reduce ..."}                                       else nobody knows what ended it
    {"kind": "case", "key": ..., "case": {...}, "status": "ok", "row": {...}, "environment": 0, ...}
    {"kind": "step", ...}                                                                see `commlib bench step`

A kill can leave half a line at the end: it is cut off. Half a line elsewhere is an error, since nobody knows of what.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from commlib.bench.options import Refused

FORMAT = 1
DONE = ("ok", "wrong", "refused", "failed")
Line = dict[str, Any]


@dataclass(slots=True)
class Results:
    """Hold what a file says. torn: bytes of half a line at its end."""

    environments: list[Line] = field(default_factory=list)
    cases: dict[str, Line] = field(default_factory=dict)  # the last one of each key
    steps: dict[str, Line] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)  # how often each key began since it ended
    torn: int = 0

    def add(self, line: Line) -> None:
        """Take one line."""
        kind = line["kind"]
        if kind == "environment":
            if line["format"] != FORMAT:
                raise Refused(f"format {line['format']} of results, expected {FORMAT}: another version wrote it")
            self.environments.append(line)
        elif kind == "begun":
            self.begun[line["key"]] += 1
        elif kind in ("case", "step"):
            (self.cases if kind == "case" else self.steps)[line["key"]] = line
            self.begun.pop(line["key"], None)
        else:
            raise Refused(f"kind {kind!r} of line is unknown: another version wrote it")


def parse(data: bytes, name: str) -> Results:
    """Return what the bytes of a file say. Raises Refused, with the line, if they are no results."""
    found = Results()
    lines = data.split(b"\n")
    found.torn = len(lines.pop())  # what follows the last end of a line
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            found.add(line)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise Refused(f"{name}, line {number}: no line of a sweep's results: {error!r}") from None
        except Refused as error:
            raise Refused(f"{name}, line {number}: {error}") from None
    return found


def read(path: Path) -> Results:
    """Return what a file says. Raises Refused."""
    try:
        found = parse(path.read_bytes(), str(path))
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None
    if not (found.environments or found.cases or found.steps):
        raise Refused(f"{path} is empty: expected the results of a sweep")
    if not found.environments:
        raise Refused(f"{path}: expected the results of a sweep, found no line that says where they were measured")
    return found


class Writer:
    """The file of one sweep that runs. Only rank 0 has one. A context manager: the file is locked while it is open."""

    def __init__(self, path: Path) -> None:
        """Open the file, make it if it is not there, and cut off half a line. Raises Refused."""
        self.path, self.remark = path, ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise Refused(f"--out {path}: cannot write there: {error.strerror}") from None
        self._lock()
        self._file.seek(0)
        data = self._file.read()
        try:
            self.results = parse(data, str(path))
        except Refused:
            self._file.close()
            raise
        if self.results.torn:
            self._file.truncate(len(data) - self.results.torn)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                self._file.close()
                raise Refused(
                    f"--out {self.path}: another sweep is writing to it; give this one another file"
                ) from None
            self.remark = f"this file system has no locks ({error.strerror}): run one sweep at a time on {self.path}"

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line. It is on the disk when this returns."""
        self.results.add(dict(line))
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        os.fsync(self._file.fileno())
