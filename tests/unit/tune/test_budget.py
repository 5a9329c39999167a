"""Measuring stays within its time: on a clock that only calls advance, however slow they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commlib.schedule import algorithms
from commlib.tune import measure, probe, stopwatch
from commlib.tune.measure import SIZES, VERBS
from commlib.tune.scopes import Cluster, Scope
from commlib.tune.stopwatch import Stopwatch


class World:
    """Two ranks seen by one of them, with a clock that calls advance by their duration."""

    def __init__(self, seconds_of: Any) -> None:
        self.rank, self.size = 0, 2
        self.now = 0.0
        self.spent: list[float] = []
        self.slow_down = 1.0
        self._seconds_of = seconds_of

    @property
    def group(self) -> World:
        return self

    programs = group

    def take(self, seconds: float) -> None:
        self.now += seconds
        self.spent.append(seconds)

    def barrier(self) -> None:
        pass

    def broadcast_object(self, value: Any) -> Any:
        return value

    def split(self, color: int, key: int) -> World:
        return self

    def execute(self, program: Any, regions: Any, name: str) -> None:
        self.take(len(program.rounds) * self.slow_down * (1e-6 + regions[0][0].array.nbytes * 1e-9))

    def collective(self, x: Any, *_: Any, out: Any = None, algorithm: str = "") -> Any:
        if algorithm:  # otherwise it is the stopwatch's own call
            self.take(self._seconds_of(x.nbytes))
        return x

    all_reduce = reduce_scatter = all_gather = broadcast = all_to_all = collective


class Combiner:
    def __init__(self, world: World) -> None:
        self.world = world

    def combine(self, given: Any, out: Any) -> None:
        self.world.take(1e-5 + out.nbytes * 1e-10)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(seconds: float, seconds_of: Any) -> Any:
        world = World(seconds_of)
        place = Scope(1, 2, world)  # type: ignore[arg-type]
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: world.now))
        monkeypatch.setattr(measure, "survey", lambda comm: Cluster((place,), (0, 1), None))
        monkeypatch.setattr(measure, "mpi_library", lambda: "Some MPI")
        monkeypatch.setattr(probe, "ReduceFunction", lambda *_: Combiner(world))
        progress_: list[tuple[float, str]] = []
        table = measure.measure(world, seconds, lambda *what: progress_.append(what))  # type: ignore[arg-type]
        return world, table, progress_

    return call


SPEEDS = {
    "fast": lambda nbytes: 1e-6 + nbytes * 1e-10,
    "a slow link": lambda nbytes: 1e-5 + nbytes * 1e-7,  # 80 Mbit/s: 64 MiB take 7 s
    "a machine under load": lambda nbytes: 0.02 + nbytes * 1e-9,
    "a cliff": lambda nbytes: 1e-6 if nbytes < 1 << 20 else 5.0,  # no forecast predicts it
}


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("seconds", [5.0, 15.0, 60.0])
def test_measuring_stays_within_the_time(run: Any, seconds: float, speed: str) -> None:
    """15 seconds took 46: the warm-up did not count, and a size that had begun was measured completely."""
    world, table, _ = run(seconds, SPEEDS[speed])
    assert world.now <= seconds + 2 * max(world.spent)  # a measurement is two calls at least
    for entry in table.entries:
        for up_to in {time.up_to for time in entry.times}:  # every comparison is complete
            assert {time.algorithm for time in entry.competitors(up_to)} >= set(algorithms(entry.verb))


def test_available_time_is_used(run: Any) -> None:
    world, table, _ = run(60.0, SPEEDS["fast"])
    assert {(e.verb, t.up_to // 2) for e in table.entries for t in e.times} == {(v, n) for v in VERBS for n in SIZES}
    assert world.now > 20


def test_a_warm_up_longer_than_the_time_leaves_the_smallest_size(run: Any) -> None:
    """The first call of each compiles, which takes minutes without a cache."""
    _, table, _ = run(1.0, lambda nbytes: 3.0)
    assert {time.up_to for entry in table.entries for time in entry.times} == {2 * SIZES[0]}
    assert {entry.verb for entry in table.entries} == set(VERBS)


def test_measurements_are_announced_before_they_start(run: Any) -> None:
    _, _, progress_ = run(5.0, SPEEDS["a slow link"])
    done = [share for share, _ in progress_]
    assert done == sorted(done) and done[-1] == 1.0
    assert [what for _, what in progress_[:3]] == ["warming up", "warming up all_reduce", "warming up reduce_scatter"]


def test_a_slow_link_leaves_time_for_the_algorithms(run: Any) -> None:
    """Its largest messages used the whole time, though smaller ones give the same information."""
    world, table, _ = run(8.0, lambda nbytes: 1e-4)
    assert len({time.up_to for time in table.entries[0].times}) > 1
    world.slow_down, before = 100.0, world.now
    measured = probe.measure_link(world, (0, 1), Stopwatch(world, 10.0), 0.3)
    assert world.now - before < 3  # all sizes would take 10
    assert measured.alpha == pytest.approx(1e-4, rel=0.01) and measured.beta == pytest.approx(2e-7, rel=0.01)


def test_calls_that_become_slower_stay_within_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call decided the number of repetitions; then another process used the core."""
    world = World(None)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: world.now))
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        world.now += 0.001 if len(calls) < 5 else 0.1

    Stopwatch(world, 100.0).measure(call, 1.0)  # type: ignore[arg-type]
    assert 0.5 < world.now < 3
    assert np.sum(calls) < 40
