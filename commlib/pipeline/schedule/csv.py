"""Schedules as CSV: a row for each rank, an action in each cell; an empty cell is idle time."""

from __future__ import annotations

import csv
import io

from commlib.errors import UsageError
from commlib.pipeline.schedule.ir import COMPUTE, WEIGHTS, Action, Kind, Schedule, Weights, parse


def read(text: str, name: str = "csv", *, weights: Weights = Weights.FLUSH) -> Schedule:
    """Return the schedule in a CSV text, with only its syntax checked: `verify` checks the rest.

    Messages in it are ignored: `lower` adds them. Raises UsageError with the row and column of an invalid action.
    """
    programs: list[tuple[Action, ...]] = []
    place: dict[int, int] = {}
    for rank, row in enumerate(row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)):
        actions = []
        for column, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                action = parse(cell)
            except UsageError as error:
                raise UsageError(f"schedule {name}, row {rank + 1}, column {column + 1}: {error}") from error
            if place.setdefault(action.stage, rank) != rank:
                raise UsageError(
                    f"schedule {name}, row {rank + 1}, column {column + 1}: {action}: stage {action.stage} is already "
                    f"on rank {place[action.stage]}; each row is a rank, and a stage is on one rank"
                )
            if action.kind in COMPUTE | WEIGHTS:
                actions.append(action)
        programs.append(tuple(actions))
    missing = sorted(set(range(max(place, default=0) + 1)) - place.keys())
    if missing:
        raise UsageError(f"schedule {name}: stage {missing[0]} has no action")
    microbatches = 1 + max((action.microbatch for program in programs for action in program), default=0)
    placement = tuple(place[stage] for stage in range(len(place)))
    steps = [action for program in programs for action in program if action.kind is Kind.STEP]
    return Schedule(name, microbatches, placement, tuple(programs), weights, 1 if steps else 0)


def write(schedule: Schedule) -> str:
    """Return a schedule as CSV, without idle cells."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(str, program) for program in schedule.programs])
    return out.getvalue()
