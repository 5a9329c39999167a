"""Report: print the job, a line for each case when it ends, and a summary, on rank 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.bench.load import busy_text
from commlib.bench.rows import OURS
from commlib.bench.sweep.plan import SweepCase
from commlib.bench.table import console
from commlib.console.text import bytes_text, seconds_text, spread_text

_MOST_REMARKS = 12
_TITLES = ("ranks", "verb", "type", "redop", "algorithm", "size", "time", "min..max", "busbw GB/s", "bound")
_WIDTHS = (7, 14, 9, 5, 18, 6, 8, 16, 10, 5)


class SweepPrinter:
    """Prints on standard output, or not at all if silent."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._console = console()
        self._peers: tuple[str, ...] = ()

    def _print(self, text: str, style: str = "") -> None:
        if not self._silent:
            self._console.print(text, style=style, markup=False, soft_wrap=True)

    def note(self, text: str, *details: str) -> None:
        """Print a remark on a separate line, with details below it."""
        self._print(f"# {text}", "dim")
        for detail in details[:_MOST_REMARKS]:
            self._print(f"#   {detail}", "dim")
        if len(details) > _MOST_REMARKS:
            self._print(f"#   and {len(details) - _MOST_REMARKS} more", "dim")

    def start(
        self,
        facts: Mapping[str, Any],
        planned: Sequence[SweepCase],
        remaining: Sequence[SweepCase],
        unable: Sequence[str],
        out: Path,
    ) -> None:
        """Print the job, the number of cases, and the worlds that the job is too small for."""
        shape = facts["ranks_of_nodes"]
        each = ", ".join(map(str, dict.fromkeys(shape)))
        self.note(f"nodes: {len(shape)}, ranks on each: {each}; {facts['mpi']}, {facts['launcher']}")
        if warning := busy_text(facts):
            self._print(f"# {warning}", "bold red")
        for text in unable:
            self.note(f"left out: {text}")
        self.note(f"{len(planned)} cases, {len(planned) - len(remaining)} of them are already in {out}")
        self._peers = tuple(dict.fromkeys(peer for case in remaining for peer in case.peers))
        if remaining:
            titles = _row((*_TITLES, *(f"x {peer}" for peer in self._peers)))
            self._print(titles, "bold")

    def line(self, line: Mapping[str, Any]) -> None:
        """Print the result of a case."""
        case, row = line["case"], line["row"]
        ranks = f"{case['nodes']}x{case['ranks_per_node']}"
        size = bytes_text(case["nbytes"]) if case["nbytes"] else ""
        what = [ranks, case["verb"], case["dtype"], case["op"], case["algorithm"], size]
        if row is None:
            self._print(f"{_row(what)}  {line['status']}: {line['reason']}", "yellow")
            return
        own = row["figures"][OURS]
        share = row["of_bound"]
        cells = [
            seconds_text(own["time_us"] / 1e6),
            spread_text(row["seconds"][OURS]),
            f"{own['busbw']:.2f}" if case["nbytes"] else "",
            "-" if share is None else f"{share:.0%}",
        ]
        cells += [_ratio(row, peer) for peer in self._peers]
        is_wrong = line["status"] == "wrong"
        self._print(_row([*what, *cells]) + ("  WRONG" if is_wrong else ""), "red" if is_wrong else "")

    def end(self, endings: Sequence[str], out: Path, *, unmeasured: int = 0) -> None:
        """Print the number of cases by status, and the next command. unmeasured: cases that there was no time for."""
        counts = Counter(endings)
        if unmeasured:
            self.note(f"no time was left for {unmeasured} cases (--seconds): start it again with the same file")
        self.note("measured: " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was left"))
        self.note(f"results are in {out}; a page of them: commlib bench report {out} -o report.html")


def _ratio(row: Mapping[str, Any], peer: str) -> str:
    figures = row["figures"]
    return f"{figures[peer]['time_us'] / figures[OURS]['time_us']:.2f}" if peer in figures else "-"


def _row(cells: Sequence[str]) -> str:
    widths = (*_WIDTHS, *(8 for _ in range(len(cells) - len(_WIDTHS))))
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()
