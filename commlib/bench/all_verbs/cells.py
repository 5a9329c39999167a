"""Cells of the table: one verb in one form, memory and size, from the record of `commlib bench all`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commlib.bench.all_verbs.goals import FORMS, find_goal
from commlib.bench.options import BenchOptionsError
from commlib.bench.verbs import VERBS
from commlib.console.text import digits

BENCHMARK = "commlib bench all"
MPI, PERSISTENT = "mpi", "persistent"
MARKS = {MPI: "", "block": "b", "pieces": "s", PERSISTENT: "p", "persistent block": "pb"}
"""The names of MPI's forms in a record, and their marks behind a time."""

MEANINGS = {
    "p": "persistent collective",
    "b": "MPI_Reduce_scatter_block",
    "pb": "persistent MPI_Reduce_scatter_block",
    "s": "MPI_Allreduce in segments of 1 MiB",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. nbytes: as requested; 0 for a barrier. mpi: the library.

    ours, peers: seconds of each round, of commlib and of each of MPI's forms that the form competes with and whose
    results were right. wrong: the number of wrong elements of commlib's results.
    """

    verb: str
    form: str
    memory: str
    nbytes: int
    ranks: int
    mpi: str
    ours: Sequence[float]
    peers: Mapping[str, Sequence[float]]
    wrong: int = 0
    is_measured: bool = True

    @property
    def key(self) -> tuple[str, str, str, int, int, str]:
        """What identifies the cell in files."""
        return self.verb, self.form, self.memory, self.nbytes, self.ranks, self.mpi

    @property
    def name(self) -> str:
        """The cell in words."""
        size = f" {self.nbytes} B" if self.nbytes else ""
        return f"{self.verb}{size}, {self.form}, {self.memory}"

    @property
    def best(self) -> str:
        """The name of MPI's fastest form; "" without one."""
        return min(self.peers, key=lambda name: statistics.median(self.peers[name]), default="")

    @property
    def goal(self) -> float:
        """The greatest share of MPI's time that the call may take."""
        return find_goal(self.verb, self.form, self.memory, self.nbytes)

    @property
    def share(self) -> float | None:
        """commlib's time / the time of MPI's fastest form, by the medians of the rounds."""
        if not self.ours or not self.peers:
            return None
        return statistics.median(self.ours) / statistics.median(self.peers[self.best])

    @property
    def status(self) -> str:
        """ "unmeasured" (no time was left), "failed" (the call raised), "wrong", "slow" (misses its goal) or "good"."""
        if not self.is_measured:
            return "unmeasured"
        if not self.ours:
            return "failed"
        if self.wrong:
            return "wrong"
        return "slow" if self.share is not None and self.share > self.goal else "good"

    def text(self) -> str:
        """Return "ours:MPI's" in microseconds, with the mark of MPI's form."""
        if not self.is_measured:
            return "unmeasured"
        theirs = f"{_microseconds(self.peers[self.best])}{MARKS[self.best]}" if self.peers else "-"
        return f"{_microseconds(self.ours) if self.ours else 'failed'}:{theirs}" + " WRONG" * (self.wrong > 0)


def _microseconds(seconds: Sequence[float]) -> str:
    return digits(statistics.median(seconds) * 1e6)


def competes(form: str, peer: str) -> bool:
    """Return whether one of commlib's forms is compared with one of MPI's: persistent ones are prepared, as plans."""
    return form == "planned" or not peer.startswith(PERSISTENT)


def read(path: Path) -> Mapping[str, Any]:
    """Return the record of a file of `commlib bench all --json`. Raises BenchOptionsError."""
    try:
        record: Mapping[str, Any] = json.loads(path.read_text())
        if record["benchmark"] != BENCHMARK:
            raise ValueError(f"it is of {record['benchmark']}")
        find_cells(record)
    except OSError as error:
        raise BenchOptionsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BenchOptionsError(f"{path}: expected a file of `{BENCHMARK} --json`: {error}") from None
    return record


def find_cells(record: Mapping[str, Any]) -> list[Cell]:
    """Return all cells of a record, in the order of measurement."""
    facts, forms = record["facts"], record["options"]["forms"]
    return [
        _cell(row, form, facts["ranks"], facts["mpi"])
        for row in record["rows"]
        for form in forms
        if form != "planned" or VERBS[row["verb"]].has_plan
    ]


def merge(cells: Sequence[Cell]) -> Cell:
    """Return one cell of the same cell in several starts: the median of each start counts as a round."""
    measured = [cell for cell in cells if cell.is_measured]
    if not measured:
        return cells[0]
    peers = [name for name in measured[0].peers if all(name in cell.peers for cell in measured)]
    is_complete = all(cell.ours for cell in measured)
    return replace(
        measured[0],
        ours=[statistics.median(cell.ours) for cell in measured] if is_complete else (),
        peers={name: [statistics.median(cell.peers[name]) for cell in measured] for name in peers},
        wrong=sum(cell.wrong for cell in measured),
    )


def _cell(row: Mapping[str, Any], form: str, ranks: int, mpi: str) -> Cell:
    seconds, wrong = row["seconds"], row["wrong"]
    peers = {
        name: times for name, times in seconds.items() if name not in FORMS and competes(form, name) and not wrong[name]
    }
    return Cell(
        row["verb"],
        form,
        row["memory"],
        row["bytes"],
        ranks,
        mpi,
        seconds.get(form, ()),
        peers,
        wrong.get(form, 0),
        is_measured=bool(seconds),
    )
