"""The table: the columns of nccl-tests, printed line by line during the run, then each peer and its ratio."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from commlib.bench.rows import OURS, PERCENTILES, BenchRow
from commlib.bench.verbs import BenchVerb


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A title, a width and a function for the cell's text; an empty text leaves the cell blank."""

    title: str
    width: int
    cell: Callable[[BenchRow], str]


def columns(
    verb: BenchVerb, peers: Sequence[str], *, bound: bool, percentiles: bool = False, events: bool = False
) -> list[TableColumn]:
    """Return the columns for a verb. bound: whether memory is the bound. events: whether GPU events time it, too."""
    return _what(verb) + figures(verb, peers, bound=bound, percentiles=percentiles, events=events)


def _what(verb: BenchVerb) -> list[TableColumn]:
    """Return the columns that identify a row."""
    chosen: list[TableColumn] = []
    if verb.name != "barrier":
        chosen += [
            TableColumn("size B", 11, lambda row: str(row.size)),
            TableColumn("count", 11, lambda row: str(row.count)),
            TableColumn("type", 10, lambda row: row.dtype),
        ]
    if verb.reduces:
        chosen.append(TableColumn("redop", 5, lambda row: row.op))
    if verb.rooted:
        chosen.append(TableColumn("root", 4, lambda row: str(row.root)))
    return chosen


def figures(
    verb: BenchVerb, peers: Sequence[str], *, bound: bool, percentiles: bool = False, events: bool = False
) -> list[TableColumn]:
    """Return the columns of measurements."""
    chosen = [
        TableColumn("time us", 11, lambda row: _microseconds(row.time())),
        TableColumn("min..max us", 17, lambda row: "..".join(map(_microseconds, row.spread()))),
    ]
    if events:
        chosen.append(TableColumn("event us", 11, _event_time))
    if percentiles:
        chosen += [
            TableColumn(f"p{share} us", 9, lambda row, share=share: _microseconds(row.percentiles[OURS][f"p{share}"]))  # type: ignore[misc]
            for share in PERCENTILES
        ]
    if verb.name != "barrier":
        chosen += [
            TableColumn("algbw GB/s", 10, lambda row: f"{row.algbw():.2f}"),
            TableColumn("busbw GB/s", 10, lambda row: f"{row.busbw():.2f}"),
        ]
        if bound:
            chosen.append(TableColumn("of bound", 8, _of_bound))
        chosen.append(TableColumn("#wrong", 7, lambda row: "-" if row.wrong is None else str(row.wrong[OURS])))
    for peer in peers:
        chosen += [
            TableColumn(f"{peer} us", 11, lambda row, peer=peer: _peer_time(row, peer)),  # type: ignore[misc]
            TableColumn("ratio", 7, lambda row, peer=peer: f"{row.ratio(peer):.2f}" if peer in row.seconds else "-"),  # type: ignore[misc]
        ]
    return chosen


class BenchTable:
    """The lines of a run. Rows measured in place and out of place share a line, as in nccl-tests."""

    def __init__(
        self,
        verb: BenchVerb,
        peers: Sequence[str],
        *,
        bound: bool,
        percentiles: bool = False,
        events: bool = False,
        places: Sequence[bool] = (),
    ) -> None:
        """places: for each row of a line, whether it is in place; named above the columns if there are two."""
        self._what = _what(verb)
        self._figures = figures(verb, peers, bound=bound, percentiles=percentiles, events=events)
        self._places = places if len(places) > 1 else (False,)

    def titles(self) -> list[str]:
        """Return the header lines."""
        chosen = self._what + self._figures * len(self._places)
        title = line(chosen, [column.title for column in chosen])
        if len(self._places) == 1:
            return [title]
        width = len(line(self._figures, [""] * len(self._figures)))
        names = ("in-place" if place else "out-of-place" for place in self._places)
        indent = " " * len(line(self._what, [""] * len(self._what)))
        return [(indent + "".join(f"{name:^{width}}" for name in names)).rstrip(), title]

    def line(self, *rows: BenchRow) -> str:
        """Return one line, with the figures of each of the rows."""
        text = line(self._what, [column.cell(rows[0]) for column in self._what])
        return text + "".join(line(self._figures, [column.cell(row) for column in self._figures]) for row in rows)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-2 else f"{seconds * 1e6:.0f}"


def _event_time(row: BenchRow) -> str:
    return _microseconds(statistics.median(row.events[OURS])) if OURS in row.events else "-"


def _of_bound(row: BenchRow) -> str:
    share = row.of_bound()
    return "-" if share is None else f"{share:.0%}"


def _peer_time(row: BenchRow, peer: str) -> str:
    if row.wrong is not None and row.wrong.get(peer):
        return f"{row.wrong[peer]} wrong"
    return _microseconds(row.time(peer)) if peer in row.seconds else "-"


def line(columns: Sequence[TableColumn], cells: Sequence[str]) -> str:
    """Return one line of the table, aligned to the right as in nccl-tests."""
    return "".join(f" {cell:>{column.width}}" for column, cell in zip(columns, cells, strict=True))


def console() -> Console:
    """Return rank 0's console: with colours and a progress bar on a terminal, plain text elsewhere."""
    terminal = is_terminal()
    return Console(force_terminal=terminal, no_color=not terminal, highlight=False)


def is_terminal(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the output goes to a terminal.

    Open MPI gives its ranks a terminal even if mpirun writes to a file, so this checks mpirun's output.
    """
    if not sys.stdout.isatty():
        return False
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return True
    try:
        target = os.readlink(f"/proc/{os.getppid()}/fd/1")
    except OSError:
        return False
    return target.startswith(("/dev/pts/", "/dev/tty"))
