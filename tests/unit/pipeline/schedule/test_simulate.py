"""Times by hand: uneven stages, messages that take time, ranks that hold bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlib.errors import UsageError
from commlib.pipeline.schedule import Costs, Kind, Link, PipelineScheduleError, lower, make, simulate
from commlib.pipeline.schedule.csv import read


def test_two_stages_match_hand_computed_times() -> None:
    """F: 1 and 3. B: 2 and 6. The second stage is busy from 1 on; the first one waits for its last gradient."""
    timing = simulate(make("1f1b", 2, 3), Costs((1, 3), (1, 3), (1, 3)))
    assert timing.seconds == 1 + 3 * 9 + 2
    assert timing.busy == (9, 27)
    assert timing.bubble == 1 - 36 / 60


def test_messages_take_time() -> None:
    """One microbatch: F, send 1, transit 5 + 100 / 50, receive 2, F, B, back, B."""
    costs = Costs((10, 10), (5, 5), (5, 5), messages={Link(0, 1): 100}, send=1, receive=2, latency=5, bandwidth=50)
    timing = simulate(make("gpipe", 2, 1), costs)
    assert timing.seconds == 10 + (1 + 7 + 2) + 20 + (1 + 7 + 2) + 10
    assert timing.sent == (100, 100)


def test_messages_travel_while_ranks_compute() -> None:
    """Eight microbatches, and a transit of a tenth: it is paid for when filling and emptying only, not 16 times."""
    free = simulate(make("1f1b", 2, 8), Costs.even(2)).seconds
    late = simulate(make("gpipe", 2, 8), Costs((1, 1), (1, 1), (1, 1), latency=0.1)).seconds
    assert late == pytest.approx(free + 0.2)


def test_a_full_queue_blocks_its_sender() -> None:
    """The second stage takes 10 for each: the first may be no more than two messages ahead of it."""
    lowered = lower(read("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3"))
    timing = simulate(replace(lowered, depths={(Link(0, 1), Kind.F): 2}), Costs((1, 10), (0, 0), (0, 0)))
    spans = zip(timing.spans[0], lowered.schedule.programs[0], strict=True)
    assert [start for (start, _), action in spans if action.kind is Kind.SEND_F] == [1, 2, 11, 21]


def test_held_bytes_are_counted() -> None:
    costs = Costs((1,) * 4, (1,) * 4, (1,) * 4, activations=(10, 20, 30, 40))
    timing = simulate(make("1f1b", 4, 8), costs)
    assert timing.peak_bytes == (40, 60, 60, 40)
    assert simulate(make("gpipe", 4, 8), costs).peak_bytes == (80, 160, 240, 320)


def test_steps_take_time() -> None:
    costs = Costs((1,), (1,), (1,), step=(5,))
    assert simulate(make("pipedream", 1, 3), costs).seconds == 3 * (3 + 5)


def test_costs_of_other_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="weight of 1 stages, but the schedule has 2"):
        simulate(make("1f1b", 2, 2), Costs((1, 1), (1, 1), (1,)))


def test_a_deadlock_has_no_time() -> None:
    with pytest.raises(PipelineScheduleError, match="waits for 1SEND_B1"):
        simulate(read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
