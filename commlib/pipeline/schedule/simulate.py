"""Simulate a schedule: the time of each action, the idle time of ranks, and their activations."""

from __future__ import annotations

from commlib.pipeline.schedule.clock import Timing, time
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.depths import deepen
from commlib.pipeline.schedule.ir import Schedule
from commlib.pipeline.schedule.lower import LoweredSchedule, lower


def simulate(schedule: Schedule | LoweredSchedule, costs: Costs | None = None) -> Timing:
    """Return the times of a schedule (with its messages, or lowered as a chain), at `costs` (default: F = I = W = 1).

    A schedule of n actions takes about n microseconds. Raises ScheduleError on a deadlock, and UsageError for costs
    with another number of stages.
    """
    lowered = schedule if isinstance(schedule, LoweredSchedule) else deepen(lower(schedule))
    costs = Costs.even(lowered.schedule.stages) if costs is None else costs
    costs.check(lowered.schedule)
    return time(lowered, costs)
