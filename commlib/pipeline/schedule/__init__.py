"""Pipeline schedules as data: plans by name, lowered to messages, verified, simulated and rendered. [pure]

schedule = make("1f1b", ranks=4, microbatches=8)
lowered = verify(schedule)            # raises ScheduleError, or every rank can run its program
simulate(lowered, costs).bubble
print(render(schedule))
"""

from commlib.pipeline.schedule import plans
from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import Action, Kind, Link, PipelineScheduleError, Schedule, Weights, chain, parse
from commlib.pipeline.schedule.lower import LoweredSchedule, lower
from commlib.pipeline.schedule.registry import SchedulePlan, find, make, plan, table
from commlib.pipeline.schedule.render import render
from commlib.pipeline.schedule.simulate import simulate
from commlib.pipeline.schedule.verify import verify

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Link",
    "LoweredSchedule",
    "SchedulePlan",
    "Schedule",
    "PipelineScheduleError",
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
