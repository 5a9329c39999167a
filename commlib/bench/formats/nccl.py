"""The format of nccl-tests 2.x: `all_reduce_perf` and its siblings, out of place and in place on one line.

A figure is N/A if the verb has no such form; #wrong is N/A without checks. Source: nccl-tests, src/util.cu.
"""

from __future__ import annotations

import statistics

from commlib.bench.formats.base import Heading
from commlib.bench.rows import OURS, BenchRow

_PROGRAMS = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
_TYPES = {"float16": "half", "float32": "float", "float64": "double"}
_OPERATIONS = {"mean": "avg", "": "none"}
_TITLES = ("time", "algbw", "busbw", "#wrong")
_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")


class NcclFormat:
    """The lines of one run."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._program = f"{_PROGRAMS.get(heading.verb, heading.verb)}_perf"
        self._speeds: list[float] = []
        self._wrong = 0

    def head(self) -> list[str]:
        """Return the header lines."""
        run, facts = self._heading, self._heading.facts
        sizes = sorted(run.sizes)
        factor = sizes[1] // sizes[0] if len(sizes) > 1 and sizes[0] else 1
        lines = [
            f"# commlib {facts['versions']['commlib']}, {facts['mpi']}, in the format of nccl-tests",
            f"# Collective test starting: {self._program}",
            f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: {factor}(factor)"
            f" warmup iters: {run.warmup_iters} iters: {run.iters} agg iters: 1"
            f" validation: {int(run.is_checked)} graph: 0",
            "#",
            "# Using devices",
        ]
        for rank, (host, pid) in enumerate(zip(facts["hosts"], run.pids, strict=True)):
            lines.append(f"#  Rank {rank:2} Group  0 Pid {pid:6} on {host:>10} device  0 [0x00] {facts['cpu']}")
        lines.append("#")
        lines.append(_what("", "", "", "", "") + "           out-of-place                       in-place          ")
        lines.append(_what("size", "count", "type", "redop", "root") + 2 * _cells(*_TITLES) + " ")
        lines.append(_what("(B)", "(elements)", "", "", "") + 2 * _cells(*_UNITS) + " ")
        return lines

    def line(self, *rows: BenchRow) -> list[str]:
        """Return the line of one size."""
        row = rows[0]
        root = -1 if row.root is None else row.root
        dtype, op = _TYPES.get(row.dtype, row.dtype), _OPERATIONS.get(row.op, row.op)
        what = f"{row.size:12}  {row.count:12}  {dtype:>8}  {op:>6}  {root:6}"
        places = {bool(one.in_place): one for one in rows}
        return [what + "".join(self._place(places.get(is_in)) for is_in in (False, True))]

    def _place(self, row: BenchRow | None) -> str:
        if row is None:
            return _cells("N/A", "N/A", "N/A", "N/A")
        self._speeds.append(row.busbw())
        wrong = None if row.wrong is None else row.wrong[OURS]
        self._wrong += wrong or 0
        figures = _fitted(row.time() * 1e6, 7), _fitted(row.algbw(), 6), _fitted(row.busbw(), 6)
        return _cells(*figures, "N/A" if wrong is None else str(wrong))

    def foot(self) -> list[str]:
        """Return the footer lines."""
        mean = statistics.fmean(self._speeds) if self._speeds else 0.0
        return [
            f"# Out of bounds values : {self._wrong} {'FAILED' if self._wrong else 'OK'}",
            f"# Avg bus bandwidth    : {mean:g} ",
            "#",
            f"# Collective test concluded: {self._program}",
            "#",
        ]


def _what(size: str, count: str, dtype: str, op: str, root: str) -> str:
    return f"# {size:>10}  {count:>12}  {dtype:>8}  {op:>6}  {root:>6}"


def _cells(time: str, algbw: str, busbw: str, wrong: str) -> str:
    return f"  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}"


def _fitted(value: float, width: int) -> str:
    """Return a number with at most two decimals, as far as they fit into the column."""
    digits = len(str(int(value))) if value >= 1 else 0
    decimals = next((n for n, room in ((2, width - 2), (1, width - 1), (0, width + 1)) if digits < room), None)
    return f"{value:.1e}" if decimals is None else f"{value:.{decimals}f}"
