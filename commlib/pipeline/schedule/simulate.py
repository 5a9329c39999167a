"""Simulate a schedule: when each action runs, how long ranks are idle, and what they hold."""

from __future__ import annotations

from commlib.pipeline.schedule.clock import Timing, time
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.depths import deepened
from commlib.pipeline.schedule.ir import Schedule
from commlib.pipeline.schedule.lower import Lowered, lower


def simulate(schedule: Schedule | Lowered, costs: Costs | None = None) -> Timing:
    """Return the times of a schedule (with its messages, or lowered as a chain), at `costs` (default: F = I = W = 1).

    A schedule of n actions takes some n microseconds. Raises ScheduleError for one that comes to a halt, and UsageError
    for costs of another number of stages.
    """
    lowered = schedule if isinstance(schedule, Lowered) else deepened(lower(schedule))
    costs = Costs.even(lowered.schedule.stages) if costs is None else costs
    costs.check(lowered.schedule)
    return time(lowered, costs)
