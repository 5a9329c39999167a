"""Render schedules as text: a row for each rank, time to the right, a time axis, and a legend.

F3  forward of microbatch 3        I3  gradients of its inputs      ·   idle
B3  its backward                   W3  gradients of the weights     ─   the action before continues
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import COMPUTE, Action, Kind, Schedule
from commlib.pipeline.schedule.simulate import simulate

IDLE, GOES_ON = "·", "─"
_TICK = 5  # units of time between two numbers of the axis
_AROUND = 6  # actions drawn before and after a fault


def render(
    schedule: Schedule, costs: Costs | None = None, *, width: int | None = None, with_legend: bool = True
) -> str:
    """Return a schedule as text, with costs that are integers (default: F = I = W = 1, B = 2).

    width: columns of text; longer rows continue below. If ranks have several stages, actions include the stage.
    with_legend: explain the symbols that occur, and the unit of time, in the last line.
    """
    timing = simulate(schedule, costs)
    rows = [_cells(timing, rank) for rank in range(schedule.ranks)]
    size = max((len(cell) for row in rows for cell in row), default=1)
    heads = [f"rank {rank}" for rank in range(schedule.ranks)]
    indent = max(map(len, heads)) + 3
    columns = max((len(row) for row in rows), default=0)
    room = columns if width is None else max(1, (width - indent) // (size + 1))
    parts = []
    for start in range(0, columns, room):
        lines = []
        for head, row in zip(heads, rows, strict=True):
            cells = " ".join(
                cell.ljust(size, GOES_ON if cell == GOES_ON else " ") for cell in row[start : start + room]
            )
            lines.append(f"{head:<{indent - 3}} │ {cells}".rstrip())
        lines.append(f"{'time':<{indent - 3}} │ {_axis(start, min(columns, start + room), size + 1)}")
        parts.append("\n".join(lines))
    if with_legend:
        text = ", ".join([*(f"{sign} {meaning}" for sign, meaning in signs(timing)), time_text(timing, costs)])
        parts.append(text if width is None else textwrap.fill(text, width))
    return f"{schedule.title}: {summary(timing)}\n" + "\n\n".join(parts) + "\n"


def _axis(start: int, end: int, cell: int) -> str:
    """Return the numbers of the time axis, from `start` to before `end`. cell: characters of a unit."""
    text = ""
    for number in (start, *range(start // _TICK * _TICK + _TICK, end, _TICK)):
        place = (number - start) * cell
        if not text or place > len(text):
            text = text.ljust(place) + str(number)
    return text


def signs(timing: Timing) -> Iterator[tuple[str, str]]:
    """Yield each symbol that occurs in a picture, and its meaning in a few words."""
    schedule = timing.lowered.schedule
    kinds = {action.kind for program in schedule.programs for action in program}
    stage, where = ("2", " in stage 2") if schedule.stages > schedule.ranks else ("", "")
    if Kind.F in kinds:
        yield f"{stage}F3", f"forward of microbatch 3{where}"
    for kind, meaning in ((Kind.B, "its backward"), (Kind.I, "gradients of its inputs"), (Kind.W, "of the weights")):
        if kind in kinds:
            yield f"{stage}{kind}3", meaning
    if timing.bubble > 0:
        yield IDLE, "idle"
    if any(
        end - start > 1
        for program, spans in zip(schedule.programs, timing.spans, strict=True)
        for action, (start, end) in zip(program, spans, strict=True)
        if action.kind in COMPUTE
    ):
        yield GOES_ON, "goes on"


def time_text(timing: Timing, costs: Costs | None) -> str:
    """Return the unit of the time axis."""
    if costs is None:
        return "time in forwards"
    exact = all(time == round(time) for spans in timing.spans for span in spans for time in span)
    return "time in units of the costs" + ("" if exact else ", rounded to whole ones")


def summary(timing: Timing) -> str:
    """Return a summary of the idle time and the activations of ranks."""
    peak = sorted(set(timing.peak))
    activations = f"{peak[0]} to {peak[-1]}" if len(peak) > 1 else str(peak[0])
    return f"{timing.bubble:.1%} idle, at most {activations} activations on a rank"


def label(action: Action, schedule: Schedule) -> str:
    """Return the short name of an action: without its stage if each rank has one."""
    return str(action) if schedule.stages > schedule.ranks else f"{action.kind}{action.microbatch}"


def _cells(timing: Timing, rank: int) -> list[str]:
    """Return the text for each unit of time."""
    schedule = timing.lowered.schedule
    cells = [IDLE] * round(timing.seconds)
    for action, (start, end) in zip(schedule.programs[rank], timing.spans[rank], strict=True):
        if action.kind not in COMPUTE:
            continue
        first, after = round(start), round(end)
        for place in range(first, after):
            cells[place] = label(action, schedule) if place == first else GOES_ON
    return cells


def mark_positions(schedule: Schedule, at: Mapping[int, int]) -> str:
    """Return the programs, valid or not, with an arrow below the action of each rank in `at`."""
    lines: list[str] = []
    for rank, program in enumerate(schedule.programs):
        place = at.get(rank, min(at.values(), default=0))
        cells, arrow = _window(program, place)
        head = f"  rank {rank} │ "
        lines.append(head + " ".join(cells))
        if rank in at:
            before = len(" ".join([*cells[:arrow], ""])) if arrow else 0
            lines.append(" " * (len(head) + before) + "↑")
    return "\n".join(lines)


def _window(program: tuple[Action, ...], place: int) -> tuple[list[str], int]:
    """Return the actions around a position, with "…" for omitted ones, and the index of the position among them."""
    start = max(0, min(place, len(program)) - _AROUND)
    cells = [str(action) for action in program[start : place + _AROUND + 1]]
    if place >= len(program):
        cells.append("(end)")
    head = ["…"] * (start > 0)
    return [*head, *cells, *["…"] * (place + _AROUND + 1 < len(program))], len(head) + place - start


def legend() -> Iterator[tuple[str, str]]:
    """Yield each symbol and its meaning."""
    yield "F3", "forward of microbatch 3; 2F3: in stage 2, if ranks have several stages"
    yield "B3", "its backward: the gradients of the stage's inputs and weights"
    yield (
        "I3, W3",
        "the backward in two parts: gradients of the inputs, for which the previous stage waits, and of the weights",
    )
    yield IDLE, "idle"
    yield GOES_ON, "the action before continues"
    yield "time", "in units of --costs; F, I and W take 1 each and B 2 by default"
