"""Common parts of the benchmarks of mixtures of experts: alternating contenders, and the parts of a step's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from commlib.bench.measure import burst_of
from commlib.expert.routing import Routing

Call = Callable[[], object]
EXCHANGES = ("dispatch", "combine", "dispatch_back", "combine_back")


def in_turn(world: Any, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of a call, per contender and round."""
    bursts = {name: burst_of(world, call) for name, call in calls.items()}
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            elapsed = bursts[name]()
            if turn:
                seconds[name].append(elapsed)
    return seconds


def parts(mixture: Any, step: Call, rounds: int) -> dict[str, float]:
    """Return the mean seconds of a step of this rank, and of its parts outside PyTorch."""
    samples: list[dict[str, float]] = []
    for _ in range(rounds):
        spent: dict[str, float] = {}
        with record_times(mixture, spent, []):
            step()
            spent.clear()
            began = time.perf_counter()
            for _ in range(20):
                step()
            spent["step"] = time.perf_counter() - began
        samples.append({name: seconds / 20 for name, seconds in spent.items()})
    return {name: statistics.median(one.get(name, 0.0) for one in samples) for name in samples[0]}


@contextmanager
def record_times(mixture: Any, spent: dict[str, float], counts: list[list[int]]) -> Iterator[None]:
    """Add up the seconds of routing, of each exchange and of its waits, and record the rows per expert."""
    exchange = mixture.exchange
    regions = getattr(getattr(exchange, "host", exchange), "regions", None)
    places = [(exchange, name, name) for name in EXCHANGES]
    places += [(mixture, "route", "routing"), (Routing, "gradient", "routing, backward")]
    if regions is not None:
        places.append((regions, "synchronize", "meetings"))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, _timed(getattr(owner, name), part, spent))
    dispatch = exchange.dispatch

    def noting(*arguments: Any) -> Any:
        result = dispatch(*arguments)
        counts.append(result[3].tolist())
        return result

    exchange.dispatch = noting
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _timed(function: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments, **keywords)
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - began
        return result

    return timed


def shares(spent: dict[str, float]) -> tuple[float, float]:
    """Return the shares of exchanges and of routing in a step."""
    routing = spent["routing"] + spent["routing, backward"]
    return sum(spent[name] for name in EXCHANGES) / spent["step"], routing / spent["step"]


def ratio(row: dict[str, Any], one: str, other: str) -> str:
    """Return the ratio of two contenders' times, the median over rounds."""
    pairs = zip(row["seconds"][one], row["seconds"][other], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"
