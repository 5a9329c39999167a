"""A burst has a length and a figure. The clock and the other rank are simulated: nothing here takes time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commlib.bench import measure


class Clock:
    """A clock that only calls advance."""

    def __init__(self):
        self.now = 0.0

    def call(self, seconds):
        return Call(self, seconds)


class Call:
    """A function that takes some seconds, and counts its calls."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.number = clock, seconds, 0

    def __call__(self):
        self.number += 1
        self.clock.now += self.seconds


@pytest.fixture
def clock(monkeypatch):
    created = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: created.now))
    return created


class World:
    """One rank and another that takes `other` seconds for each call."""

    def __init__(self, other=0.0):
        self.other, self.barriers = other, 0

    def Barrier(self):
        self.barriers += 1

    def allreduce(self, mine, op):
        return max(mine, self.other)


def test_the_slowest_rank_sets_the_figure(clock):
    assert measure.run_burst(World(other=0.5), clock.call(0.25), 4) == 0.5
    assert measure.run_burst(World(other=0.125), clock.call(0.25), 4) == 0.25


def test_half_a_burst_settles_and_does_not_count(clock):
    call, world = clock.call(1), World()
    assert measure.run_burst(world, call, 10) == 1
    assert (call.number, world.barriers, clock.now) == (15, 1, 15)


@pytest.mark.parametrize("seconds, expected", [(1.0, 2), (2e-3, 15), (1e-6, 2000), (0.0, 2000)])
def test_a_burst_takes_about_30_ms(clock, seconds, expected):
    call = clock.call(seconds)
    burst = measure.burst_of(World(), call)
    call.number = 0
    assert burst() == pytest.approx(seconds)
    assert call.number == expected + expected // 2


def test_a_burst_that_took_much_too_long_is_shortened(clock):
    """Ranks that share cores: the first two calls may be a thousand times faster than the rest."""
    call = clock.call(1e-5)
    burst = measure.burst_of(World(), call)
    call.seconds = 2e-3
    burst()
    call.number = 0
    assert burst() == pytest.approx(2e-3)
    assert call.number == 15 + 7


def test_fresh_data_is_written_before_each_call_and_outside_the_time(clock):
    write, call, world = clock.call(100), clock.call(1e-3), World()
    assert measure.run_fresh_burst(world, call, 4, write) == pytest.approx(1e-3)
    assert (write.number, call.number, world.barriers) == (4, 4 + 2, 4)  # two to settle
    assert measure.burst_of(world, call, write)() == pytest.approx(1e-3)
    assert write.number == 4 + 30


def test_every_second_round_is_in_the_opposite_order():
    order = []

    def burst(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    figures = list(measure.rounds({"a": burst("a"), "b": burst("b")}, 3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == [{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 3.0}, {"a": 5.0, "b": 6.0}]


PASSES = {
    "a copy": (800, 800, False, {"copyto": [800]}),
    "an update in place": (800, 800, True, {"invert": [800]}),
    "more read than written": (800, 200, False, {"copyto": [200], "max": [600]}),
    "the same, in place": (800, 200, True, {"invert": [200], "max": [600]}),
    "more written than read": (320, 800, False, {"copyto": [320, 320, 160]}),
}


@pytest.mark.parametrize("case", PASSES)
def test_a_pass_over_memory_touches_each_byte_once(monkeypatch, case):
    read, written, replaces, expected = PASSES[case]
    done: dict[str, list[int]] = {}

    class Watched(np.ndarray):
        def max(self, *arguments: Any, **options: Any) -> Any:
            done.setdefault("max", []).append(self.nbytes)

    def note(name):
        def run(first, second=None, out=None):
            assert name == "invert" or not np.shares_memory(first, second)
            assert name == "copyto" or first is out
            done.setdefault(name, []).append(first.nbytes)

        return run

    ones = np.ones
    monkeypatch.setattr(np, "ones", lambda *arguments: ones(*arguments).view(Watched))
    run = measure.memory_pass(read, written, replaces)
    for name in ("copyto", "invert"):
        monkeypatch.setattr(np, name, note(name))
    run()
    assert done == expected
