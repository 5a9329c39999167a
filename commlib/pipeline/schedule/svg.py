"""Render schedules as SVG: a row for each rank, time to the right, a colour for each kind of action."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from commlib.pipeline.schedule.clock import Timing
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import COMPUTE, Kind, Schedule
from commlib.pipeline.schedule.render import label, summary
from commlib.pipeline.schedule.simulate import simulate

# Fill and text, distinguishable without colours: forwards are light, backwards are dark.
_COLOURS = {
    Kind.F: ("#cfe2f3", "#1b1b1b"),
    Kind.B: ("#38761d", "#ffffff"),
    Kind.I: ("#45818e", "#ffffff"),
    Kind.W: ("#f6b26b", "#1b1b1b"),
}
_ROW, _GAP, _HEAD, _TITLE = 24, 4, 60, 28  # pixels
_WIDEST = 1600  # of the picture, unless actions would be too narrow to see
_NARROWEST = 2.0


def svg(schedule: Schedule, costs: Costs | None = None) -> str:
    """Return a schedule as an SVG document, with `costs` (default: F = I = W = 1, B = 2)."""
    timing = simulate(schedule, costs)
    shortest = min((end - start for _, _, start, end in _actions(timing) if end > start), default=1.0)
    scale = max(min(40 / shortest, _WIDEST / max(timing.seconds, shortest)), _NARROWEST / shortest)
    width, height = _HEAD + timing.seconds * scale + _GAP, _TITLE + schedule.ranks * (_ROW + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(schedule.title)}</title>",
        f'<text x="2" y="16">{escape(schedule.title)}: {escape(summary(timing))}</text>',
    ]
    for rank in range(schedule.ranks):
        top = _TITLE + rank * (_ROW + _GAP)
        lines.append(f'<text x="2" y="{top + 16}">rank {rank}</text>')
        idle = f'x="{_HEAD}" y="{top}" width="{timing.seconds * scale:.1f}" height="{_ROW}"'
        lines.append(f'<rect {idle} fill="#f3f3f3"/>')
    for rank, text, start, end in _actions(timing):
        top, left, size = _TITLE + rank * (_ROW + _GAP), _HEAD + start * scale, (end - start) * scale
        fill, ink = _COLOURS[Kind(text.lstrip("0123456789")[0])]
        box = f'x="{left:.1f}" y="{top}" width="{size:.1f}" height="{_ROW}"'
        lines.append(f'<rect {box} fill="{fill}" stroke="#ffffff"><title>{text}</title></rect>')
        if size > 7 * len(text):
            middle = f'x="{left + size / 2:.1f}" y="{top + 16}" text-anchor="middle" pointer-events="none"'
            lines.append(f'<text {middle} fill="{ink}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _actions(timing: Timing) -> Iterator[tuple[int, str, float, float]]:
    """Yield rank, text, start and end of the computing actions."""
    schedule = timing.lowered.schedule
    for rank, program in enumerate(schedule.programs):
        for action, (start, end) in zip(program, timing.spans[rank], strict=True):
            if action.kind in COMPUTE:
                yield rank, label(action, schedule), start, end
