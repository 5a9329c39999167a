"""Reports count what was reduced, cut into steps."""

import time

import pytest

from commlib.data_parallel import Statistics, StepReport
from commlib.data_parallel.report import StepClock


def test_reports_are_differences() -> None:
    moments = iter([10.0, 13.0, 20.0])
    clock = StepClock(lambda: next(moments))
    now = Statistics(exposed_seconds=1.0, hidden_seconds=0.5, sent_bytes=40, uncompressed_bytes=80)
    assert clock.step(now) == StepReport(1, 3.0, 2.0, 1.0, 0.5, 40, 80)
    now.exposed_seconds += 2.0
    now.sent_bytes += 1
    assert clock.step(now) == StepReport(2, 7.0, 5.0, 2.0, 0.0, 1, 0)


def test_excess_exposed_time_leaves_zero_computing() -> None:
    """Exposed time before the clock starts, as of an early reduction, does not make computing negative."""
    moments = iter([0.0, 1.0])
    assert StepClock(lambda: next(moments)).step(Statistics(exposed_seconds=4.0)).compute_seconds == 0


def test_nested_time_is_exposed_once() -> None:
    statistics = Statistics(exposed_seconds=5.0)
    started = time.perf_counter()
    with pytest.raises(KeyError), statistics.exposing():
        time.sleep(0.01)
        statistics.exposed_seconds += 100.0  # a part that counts its own time
        raise KeyError
    assert 5.01 <= statistics.exposed_seconds <= 5 + time.perf_counter() - started
