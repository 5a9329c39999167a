"""`commlib show pipeline`: drawings of pipeline schedules, with the idle share, activations and weights of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.console.text import columns
from commlib.console.width import wrap
from commlib.errors import UsageError
from commlib.pipeline.schedule import Costs, Schedule, Timing, find, make, render, simulate, table, verify
from commlib.pipeline.schedule.csv import read, write
from commlib.pipeline.schedule.render import legend
from commlib.pipeline.schedule.svg import svg
from commlib.pipeline.schedule.versions import count_versions

RANKS, MICROBATCHES = 4, 8
MOST_ACTIONS = 200_000


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """The command's options for a pipeline."""

    schedule: str | None
    ranks: int | None
    stages: int | None
    microbatches: int | None
    costs: str | None

    def schedule_of(self, name: str) -> Schedule:
        """Return a schedule by name, or from a CSV file, which defines all sizes itself. Raises UsageError."""
        if name.lower().endswith(".csv"):
            if given := [size for size in (self.ranks, self.stages, self.microbatches) if size is not None]:
                raise UsageError(f"{name} defines the numbers of ranks, stages and microbatches itself; got {given[0]}")
            try:
                return read(Path(name).read_text(), Path(name).stem)
            except OSError as error:
                raise UsageError(f"{name}: {error.strerror}") from error
        plan, ranks = find(name), self.ranks
        if ranks is None:
            if self.stages is not None and self.stages % plan.chunks:
                raise UsageError(
                    f"schedule {plan.name} has {plan.chunks} stages on each rank: {self.stages} is not a multiple"
                )
            ranks = RANKS if self.stages is None else self.stages // plan.chunks
        schedule = make(plan.name, ranks, self.microbatches or MICROBATCHES, stages=self.stages)
        if (count := sum(map(len, schedule.programs))) > MOST_ACTIONS:
            raise UsageError(f"{schedule.title}: {count} actions are more than the {MOST_ACTIONS} that can be shown")
        return schedule

    def costs_of(self, schedule: Schedule) -> Costs:
        """Return the costs "F,I,W" of all stages. Raises UsageError."""
        try:
            forward, inputs, weights = (float(part) for part in (self.costs or "1,1,1").split(","))
        except ValueError:
            raise UsageError(f"--costs {self.costs}: expected three numbers, of F, I and W, such as 1,1,1") from None
        if min(forward, inputs, weights) < 0 or forward + inputs + weights <= 0:
            raise UsageError(f"--costs {self.costs}: expected numbers that are not negative, and a positive sum")
        return Costs.even(schedule.stages, forward, inputs, weights)


def pipeline_list(request: PipelineRequest) -> list[dict[str, Any]]:
    """Return the description and numbers of each schedule, at the requested sizes."""
    rows = []
    for name, plan in table.items():
        schedule = request.schedule_of(name)
        timing = simulate(schedule, request.costs_of(schedule))
        rows.append({"name": name, "description": plan.description, **_numbers(schedule, timing)})
    return rows


def list_text(request: PipelineRequest, width: int | None) -> str:
    """Return the table of all schedules."""
    items = pipeline_list(request)
    rows = [["schedule", "stages", "idle", "activations", "weights"]]
    for item in items:
        held = max(item["activations"]) * item["ranks"] / item["stages"]
        rows.append([item["name"], str(item["stages"]), f"{item['idle']:.1%}", f"{held:g}", str(item["weights"])])
    numbers = columns(rows).split("\n")
    indent = max(map(len, numbers)) + 2
    titles = ["", *(item["description"].split("\n")[0] for item in items)]
    lines = (f"{line:<{indent}}{title}".rstrip() for line, title in zip(numbers, titles, strict=True))
    table_text = "\n".join(wrap(line, width, indent=indent) for line in lines)
    sizes = f"{request.ranks or RANKS} ranks, {request.microbatches or MICROBATCHES} microbatches"
    return (
        f"{table_text}\n\nidle: share of the ranks' time, for {sizes}, F,I,W = {request.costs or '1,1,1'}\n"
        "activations: the maximum that a rank holds, in microbatches of a rank's full part of the model\n"
        "weights: the maximum number of versions that a rank keeps\n\ncommlib show pipeline --schedule NAME draws one."
    )


def pipeline_text(request: PipelineRequest, name: str, width: int | None, *, with_legend: bool | None) -> str:
    """Return the picture of a schedule. with_legend: None for one line; True for a line for each symbol."""
    schedule = request.schedule_of(name)
    verify(schedule)
    costs = request.costs_of(schedule) if request.costs else None
    parts = []
    if schedule.name in table:
        parts.append(wrap(find(schedule.name).description, width))
    parts.append(render(schedule, costs, width=width, with_legend=with_legend is None))
    if with_legend:
        rows = list(legend())
        widest = max(len(sign) for sign, _ in rows)
        text = "\n".join(f"{sign:<{widest}}  {meaning}" for sign, meaning in rows)
        parts.append(wrap(text, width, indent=widest + 2))
    return "\n\n".join(part.rstrip() for part in parts)


def pipeline_svg(request: PipelineRequest, name: str) -> str:
    """Return the picture as SVG."""
    schedule = request.schedule_of(name)
    verify(schedule)
    return svg(schedule, request.costs_of(schedule) if request.costs else None)


def pipeline_data(request: PipelineRequest, name: str) -> dict[str, Any]:
    """Return the JSON data of a schedule: its numbers, and each rank's actions and times."""
    schedule = request.schedule_of(name)
    lowered = verify(schedule)
    timing = simulate(lowered, request.costs_of(schedule))
    programs = lowered.schedule.programs
    ranks = [
        [{"action": str(action), "start": start, "end": end} for action, (start, end) in zip(*rank, strict=True)]
        for rank in zip(programs, timing.spans, strict=True)
    ]
    depths = {f"{link} {kind}": depth for (link, kind), depth in lowered.depths.items()}
    return {"name": schedule.name, **_numbers(schedule, timing), "depths": depths, "programs": ranks}


def pipeline_csv(request: PipelineRequest, name: str) -> str:
    """Return the schedule as CSV."""
    return write(request.schedule_of(name)).rstrip()


def _numbers(schedule: Schedule, timing: Timing) -> dict[str, Any]:
    return {
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement,
        "seconds": timing.seconds,
        "idle": timing.bubble,
        "activations": timing.peak,
        "weights": max(count_versions(schedule)),
    }
