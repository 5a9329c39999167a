"""Report: print the figures of a step on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commlib.bench.load import busy_text
from commlib.bench.table import console
from commlib.console.text import seconds_text


def show(line: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Print the measurements, one figure per line."""
    step = line["step"]
    rows = [
        ("step", seconds_text(step)),
        ("tokens/s", f"{line['tokens_per_second']:,.0f}, of all ranks"),
        ("computes", f"{seconds_text(line['alone'])}, a rank's computation alone"),
        ("exposed", f"{_signed(line['exposed'])}, {line['exposed'] / step:.0%} of the step: communication and waiting"),
    ]
    if line["peer"]:
        rows.append((line["peer"], f"{seconds_text(line['peer_step'])}, {line['ratio']:.2f} times commlib's"))
    difference = "not finite" if line["difference"] is None else f"{line['difference']:.1e}"
    verdict = "same as" if line["status"] == "ok" else "NOT as"
    rows.append(("losses", f"{verdict} in one process: they differ by {difference}"))
    out = console()
    kind, framework = line["kind_of_step"], line["framework"]
    heading = f"# {kind} with {framework}, {line['ranks']} ranks, {facts['mpi']}"
    model = f"# {line['model']}, {line['parameters'] / 1e6:.2f} M parameters"
    if warning := busy_text(facts):
        model = f"# {warning}\n{model}"
    for text in (heading, model, *(f"{name:>14}  {text}" for name, text in rows)):
        out.print(text, markup=False, soft_wrap=True)


def _signed(seconds: float) -> str:
    return f"-{seconds_text(-seconds)}" if seconds < 0 else seconds_text(seconds)
