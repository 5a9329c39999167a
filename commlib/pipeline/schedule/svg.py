"""Render schedules as SVG: a row for each rank, time to the right, a colour for each kind of action; axis, legend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import COMPUTE, Kind, Schedule
from commlib.pipeline.schedule.render import GOES_ON, IDLE, label, signs, summary, time_text
from commlib.pipeline.schedule.simulate import simulate

# Fill and text, distinguishable without colours: forwards are light, backwards are dark.
_COLOURS = {
    Kind.F: ("#cfe2f3", "#1b1b1b"),
    Kind.B: ("#38761d", "#ffffff"),
    Kind.I: ("#45818e", "#ffffff"),
    Kind.W: ("#f6b26b", "#1b1b1b"),
}
_IDLE = "#f3f3f3"
_ROW, _GAP, _HEAD, _TITLE = 24, 4, 60, 28  # pixels
_AXIS, _LEGEND = 22, 22  # pixels of height
_BOX, _LETTER = 14, 6.2  # pixels of a box of the legend, and of a letter at most
_TICKS = 10  # numbers of the axis, about
_WIDEST = 1600  # of the picture, unless actions would be too narrow to see
_NARROWEST = 2.0


def svg(schedule: Schedule, costs: Costs | None = None) -> str:
    """Return a schedule as an SVG document, with `costs` (default: F = I = W = 1, B = 2)."""
    timing = simulate(schedule, costs)
    shortest = min((end - start for _, _, start, end in _actions(timing) if end > start), default=1.0)
    scale = max(min(40 / shortest, _WIDEST / max(timing.seconds, shortest)), _NARROWEST / shortest)
    bottom = _TITLE + schedule.ranks * (_ROW + _GAP)
    legend, legend_width = _legend(timing, costs, bottom + _AXIS)
    title = f"{schedule.title}: {summary(timing)}"
    width = max(_HEAD + timing.seconds * scale + 4 * _GAP, legend_width, 2 + len(title) * _LETTER)
    height = bottom + _AXIS + _LEGEND
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(schedule.title)}</title>",
        f'<text x="2" y="16">{escape(title)}</text>',
    ]
    for rank in range(schedule.ranks):
        top = _TITLE + rank * (_ROW + _GAP)
        lines.append(f'<text x="2" y="{top + 16}">rank {rank}</text>')
        idle = f'x="{_HEAD}" y="{top}" width="{timing.seconds * scale:.1f}" height="{_ROW}"'
        lines.append(f'<rect {idle} fill="{_IDLE}"/>')
    for rank, text, start, end in _actions(timing):
        top, left, size = _TITLE + rank * (_ROW + _GAP), _HEAD + start * scale, (end - start) * scale
        fill, ink = _COLOURS[Kind(text.lstrip("0123456789")[0])]
        box = f'x="{left:.1f}" y="{top}" width="{size:.1f}" height="{_ROW}"'
        lines.append(f'<rect {box} fill="{fill}" stroke="#ffffff"><title>{text}</title></rect>')
        if size > 7 * len(text):
            middle = f'x="{left + size / 2:.1f}" y="{top + 16}" text-anchor="middle" pointer-events="none"'
            lines.append(f'<text {middle} fill="{ink}">{text}</text>')
    return "\n".join([*lines, *_axis(timing, scale, bottom), *legend, "</svg>", ""])


def _axis(timing: Timing, scale: float, top: int) -> Iterator[str]:
    """Yield the time axis below the rows: a line, and numbers at multiples of 1, 2 or 5."""
    right = _HEAD + timing.seconds * scale
    yield f'<line x1="{_HEAD}" y1="{top}" x2="{right:.1f}" y2="{top}" stroke="#1b1b1b"/>'
    yield f'<text x="2" y="{top + 14}">time</text>'
    rough = max(timing.seconds, 1e-12) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    for number in range(int(timing.seconds / step + 1e-9) + 1):
        x = _HEAD + number * step * scale
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}" stroke="#1b1b1b"/>'
        yield f'<text x="{x:.1f}" y="{top + 14}" text-anchor="middle">{number * step:g}</text>'


def _legend(timing: Timing, costs: Costs | None, top: int) -> tuple[list[str], float]:
    """Return a box and a text for each kind of action that occurs, the unit of time, and the width of all of it."""
    lines, left = [], 2.0
    for sign, meaning in signs(timing):
        if sign == GOES_ON:  # a box is as long as its action
            continue
        fill, _ = (_IDLE, "") if sign == IDLE else _COLOURS[Kind(sign.strip("0123456789"))]
        text = meaning if sign == IDLE else f"{sign}: {meaning}"
        lines.append(
            f'<rect x="{left:.1f}" y="{top + 2}" width="{_BOX}" height="{_BOX}" fill="{fill}" class="legend"/>'
        )
        lines.append(f'<text x="{left + _BOX + 4:.1f}" y="{top + 13}">{escape(text)}</text>')
        left += _BOX + 4 + len(text) * _LETTER + 12
    unit = time_text(timing, costs).partition(",")[0]  # nothing is rounded here
    return [*lines, f'<text x="{left:.1f}" y="{top + 13}">{unit}</text>'], left + len(unit) * _LETTER


def _actions(timing: Timing) -> Iterator[tuple[int, str, float, float]]:
    """Yield rank, text, start and end of the computing actions."""
    schedule = timing.lowered.schedule
    for rank, program in enumerate(schedule.programs):
        for action, (start, end) in zip(program, timing.spans[rank], strict=True):
            if action.kind in COMPUTE:
                yield rank, label(action, schedule), start, end
