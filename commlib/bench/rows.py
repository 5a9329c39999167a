"""BenchRow: the measurements at one size, and the figures derived from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
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
