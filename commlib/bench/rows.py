"""BenchRow: the measurements at one size, the figures derived from them, and rows as comma-separated values."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from commlib.bench.verbs import VERBS

OURS = "commlib"
PERCENTILES = (50, 95, 99)
BOUND_FROM = 64 << 10  # bytes; for less, the overhead of a call is the bound, not memory


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One verb, dtype, operation and size. The dicts are by contender; a contender without a figure is left out.

    seconds: of one call, one figure per round. wrong: number of wrong elements, over all ranks; None if unchecked.
    bound_seconds: of the memory pass of `Verb.bound`, on all ranks at once, one figure per round.
    percentiles: "p50", "p95" and "p99" of single calls in seconds, if requested. events: as `seconds`, but by a GPU's
    events on the stream of the caller; empty on the host.
    """

    verb: str
    ranks: int
    dtype: str
    op: str
    root: int | None
    size: int
    count: int
    seconds: dict[str, list[float]]
    wrong: dict[str, int] | None
    bound_seconds: list[float]
    in_place: bool | None = None
    percentiles: dict[str, dict[str, float]] = field(default_factory=dict)
    events: dict[str, list[float]] = field(default_factory=dict)

    def time(self, contender: str = OURS) -> float:
        """Return the median of the rounds, in seconds."""
        return statistics.median(self.seconds[contender])

    def spread(self, contender: str = OURS) -> tuple[float, float]:
        """Return the shortest and the longest round, in seconds."""
        return min(self.seconds[contender]), max(self.seconds[contender])

    def ratio(self, peer: str) -> float:
        """Return the peer's time divided by commlib's."""
        return self.time(peer) / self.time()

    def algbw(self, contender: str = OURS) -> float:
        """Return size / time in GB/s (10^9 bytes)."""
        return self.size / self.time(contender) / 1e9

    def busbw(self, contender: str = OURS) -> float:
        """Return algbw times the verb's factor, in GB/s."""
        return self.algbw(contender) * float(VERBS[self.verb].factor(self.ranks))

    def of_bound(self) -> float | None:
        """Return the minimum time of the memory pass / the measured time, or None if it is not meaningful."""
        if not self.bound_seconds or self.size < BOUND_FROM:
            return None
        return min(self.bound_seconds) / self.time()

    def figures(self) -> dict[str, object]:
        """Return all measured and derived figures, for JSON."""
        derived = {
            name: {"time_us": self.time(name) * 1e6, "algbw": self.algbw(name), "busbw": self.busbw(name)}
            for name in self.seconds
        }
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "of_bound": self.of_bound(),
            "figures": derived,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the times that 50, 95 and 99 of 100 calls do not exceed."""
    return {f"p{share}": float(np.percentile(seconds, share)) for share in PERCENTILES}


def mistakes(rows: Iterable[BenchRow]) -> int:
    """Return the number of wrong elements in commlib's results."""
    return sum(row.wrong[OURS] for row in rows if row.wrong is not None)


# One line per contender, with the same columns for every verb.
_CSV_COLUMNS = (
    *("verb", "ranks", "contender", "in_place", "size_bytes", "count", "type", "redop", "root"),
    *("time_us", "min_us", "max_us", *(f"p{share}_us" for share in PERCENTILES)),
    *("algbw_GBps", "busbw_GBps", "of_bound", "wrong"),
)


def _csv_line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


CSV_TITLE = _csv_line(_CSV_COLUMNS)


def csv_lines(rows: Iterable[BenchRow]) -> Iterator[str]:
    """Yield the lines of rows. A missing measurement is an empty cell. Raises nothing."""
    for row in rows:
        for name in row.seconds:
            yield _csv_line(_csv_cells(row, name))


def _csv_cells(row: BenchRow, name: str) -> list[object]:
    single = row.percentiles.get(name, {})
    share = row.of_bound() if name == OURS else None
    in_place = "" if row.in_place is None else int(row.in_place)
    figures = [f"{single[key] * 1e6:.3f}" if (key := f"p{p}") in single else "" for p in PERCENTILES]
    speed = [f"{row.algbw(name):.4f}", f"{row.busbw(name):.4f}"] if row.size else ["", ""]
    return [
        *(row.verb, row.ranks, name, in_place, row.size, row.count, row.dtype, row.op),
        "" if row.root is None else row.root,
        *(f"{seconds * 1e6:.3f}" for seconds in (row.time(name), *row.spread(name))),
        *(*figures, *speed),
        "" if share is None else f"{share:.4f}",
        "" if row.wrong is None else row.wrong[name],
    ]
