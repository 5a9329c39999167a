"""SweepResults: a file of JSON lines. A sweep appends a line when each case ends, and reads the file to continue.

    {"kind": "environment", "number": 0, "format": 1, "plan": {...}, "facts": {...}}     environment of the next lines
    {"kind": "begun", "key": "2x4 all_reduce ..."}                                       names a case that ends the job
    {"kind": "case", "key": ..., "case": {...}, "status": "ok", "row": {...}, "environment": 0, ...}
    {"kind": "step", ...}                                                                see `commlib bench step`

A kill can leave an incomplete line at the end, which is cut off. An incomplete line elsewhere is an error.
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

from commlib.bench.options import BenchOptionsError

FORMAT = 1
DONE = ("ok", "wrong", "refused", "failed")
Line = dict[str, Any]


@dataclass(slots=True)
class SweepResults:
    """The contents of a file. torn: bytes of an incomplete line at its end."""

    environments: list[Line] = field(default_factory=list)
    cases: dict[str, Line] = field(default_factory=dict)  # the last line of each key
    steps: dict[str, Line] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)  # how often each key began since it last ended
    torn: int = 0

    def add(self, line: Line) -> None:
        """Add one line."""
        kind = line["kind"]
        if kind == "environment":
            if line["format"] != FORMAT:
                raise BenchOptionsError(
                    f"format {line['format']} of results, expected {FORMAT}: another version wrote it"
                )
            self.environments.append(line)
        elif kind == "begun":
            self.begun[line["key"]] += 1
        elif kind in ("case", "step"):
            (self.cases if kind == "case" else self.steps)[line["key"]] = line
            self.begun.pop(line["key"], None)
        else:
            raise BenchOptionsError(f"kind {kind!r} of line is unknown: another version wrote it")


def parse(data: bytes, name: str) -> SweepResults:
    """Return the results in the bytes of a file. Raises Refused, with the line number, if they are invalid."""
    results = SweepResults()
    lines = data.split(b"\n")
    results.torn = len(lines.pop())  # the text after the last newline
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            results.add(line)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise BenchOptionsError(f"{name}, line {number}: not a line of a sweep's results: {error!r}") from None
        except BenchOptionsError as error:
            raise BenchOptionsError(f"{name}, line {number}: {error}") from None
    return results


def read(path: Path) -> SweepResults:
    """Return the results in a file. Raises Refused."""
    try:
        results = parse(path.read_bytes(), str(path))
    except OSError as error:
        raise BenchOptionsError(f"{path}: cannot be read: {error.strerror}") from None
    if not (results.environments or results.cases or results.steps):
        raise BenchOptionsError(f"{path} is empty: expected the results of a sweep")
    if not results.environments:
        raise BenchOptionsError(f"{path}: expected the results of a sweep, found no line with the environment")
    return results


class ResultsWriter:
    """The open file of a running sweep. Only rank 0 has one. A context manager: the file is locked while it is open."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off an incomplete line. Raises Refused."""
        self.path, self.remark = path, ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise BenchOptionsError(f"--out {path}: cannot write this file: {error.strerror}") from None
        self._lock()
        self._file.seek(0)
        data = self._file.read()
        try:
            self.results = parse(data, str(path))
        except BenchOptionsError:
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
                raise BenchOptionsError(
                    f"--out {self.path}: another sweep is writing to it; give this one another file"
                ) from None
            self.remark = (
                f"this file system has no locks ({error.strerror}): run only one sweep at a time on {self.path}"
            )

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line. It is on disk when this returns."""
        self.results.add(dict(line))
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        os.fsync(self._file.fileno())
