"""Schedules of pipelines as data: plans by name, messages added, proved, simulated and drawn. [pure]

schedule = make("1f1b", ranks=4, microbatches=8)
lowered = verify(schedule)            # raises ScheduleError, or every rank can run its program
simulate(lowered, costs).bubble
print(render(schedule))
"""

from commlib.pipeline.schedule import plans
from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import Action, Kind, Link, Schedule, ScheduleError, Weights, chain, parse
from commlib.pipeline.schedule.lower import Lowered, lower
from commlib.pipeline.schedule.registry import Plan, find, make, plan, table
from commlib.pipeline.schedule.render import render
from commlib.pipeline.schedule.simulate import simulate
from commlib.pipeline.schedule.verify import verify

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Link",
    "Lowered",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Timing",
    "Weights",
    "chain",
    "find",
    "lower",
    "make",
    "parse",
    "plan",
    "plans",
    "render",
    "simulate",
    "table",
    "verify",
]
