"""Text: print the findings of `commlib trace summary`."""

from __future__ import annotations

from commlib.console.text import bytes_text, columns, seconds_text
from commlib.console.width import wrap
from commlib.trace.advice import LEAST_OF_A_STEP
from commlib.trace.summary import StepFigures, Summary

_VERBS, _PARTS = 8, 6  # the maximum number of each to show


def summary_text(summary: Summary, width: int | None) -> str:
    """Return a summary as text."""
    parts = [*(wrap(f"note: {note}", width, indent=6) for note in summary.notes)]
    if parts:
        parts.append("")
    parts += [
        _ranks(summary, width),
        "",
        _waits(summary, width),
        "",
        _verbs(summary, width),
        "",
        _steps(summary.steps, width),
    ]
    if summary.advice:
        parts += ["", "What to try:", *(wrap(f"- {text}", width, indent=2) for text in summary.advice)]
    if left_out := _left_out(summary):
        parts += ["", wrap(f"The advice leaves out {'; '.join(left_out)}.", width)]
    return "\n".join(parts)


def _ranks(summary: Summary, width: int | None) -> str:
    rows = [("rank", "of", "communication", "hidden", "exposed", "lost waiting", "late count", "caused wait")]
    for rank in summary.ranks:
        share = f"{rank.hidden / rank.communication:.0%}" if rank.communication else "-"
        rows.append((
            str(rank.rank),
            _time(rank.span),
            _time(rank.communication),
            share,
            _time(rank.exposed),
            _time(rank.lost),
            str(rank.late_count),
            _time(rank.caused_wait),
        ))  # fmt: skip
    return columns(rows, width=width)


def _waits(summary: Summary, width: int | None) -> str:
    pairs = [(rank.rank, last, lost) for rank in summary.ranks for last, lost in rank.lost_for.items()]
    if not pairs:
        return "No rank lost time waiting for another one."
    longest = sorted(pairs, key=lambda pair: -pair[2])[:_PARTS]
    texts = [f"rank {rank} for rank {last} {seconds_text(lost)}" for rank, last, lost in longest]
    more = f", and {len(pairs) - len(texts)} more pairs" if len(pairs) > len(texts) else ""
    return wrap(f"Waited: {', '.join(texts)}{more}.", width)


def _verbs(summary: Summary, width: int | None) -> str:
    rows = [("verb", "calls", "bytes", "time", "a call")]
    for verb in summary.verbs[:_VERBS]:
        each = seconds_text(verb.seconds / verb.calls)
        rows.append((verb.verb, str(verb.calls), bytes_text(verb.bytes), seconds_text(verb.seconds), each))
    return columns(rows, width=width)


def _steps(steps: StepFigures, width: int | None) -> str:
    if steps.marked_by:
        head = (
            f"{steps.count} steps; step {steps.typical} took the median of {seconds_text(steps.seconds)}; "
            "critical path:"
        )
    else:
        head = (
            f"No steps are marked (commlib.mark_step() marks them); all {seconds_text(steps.seconds)} as one step; "
            "critical path:"
        )
    lines = [
        f"  {part.share:4.0%}  {seconds_text(part.seconds):>8}  rank {part.rank} {_does(part.what)}"
        for part in steps.path[:_PARTS]
    ]
    rest = 1 - sum(part.share for part in steps.path[:_PARTS])
    if rest > 0.005:
        lines.append(f"  {rest:4.0%}  others")
    return "\n".join([wrap(head, width), *lines])


def _left_out(summary: Summary) -> list[str]:
    left, texts = summary.left_out, []
    if left.steps:
        steps = "step 1" if left.steps == 1 else f"steps 1 to {left.steps}"
        texts.append(f"start-up until the end of {steps} ({seconds_text(left.start_up)})")
    if left.after:
        texts.append(f"{seconds_text(left.after)} after step {summary.steps.count}")
    if left.small:
        texts.append(f"what is less than {LEAST_OF_A_STEP:.0%} of a step: {', '.join(left.small)}")
    return texts


def _does(what: str) -> str:
    return what if what == "computes" else f"in {what}"


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"
