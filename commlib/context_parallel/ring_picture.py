"""Drawing of ring attention: the work of each rank in each step. [pure]"""

from __future__ import annotations

from commlib.context_parallel.layout import SequenceLayout
from commlib.context_parallel.ring_steps import pairs, steps


def draw(layout: SequenceLayout, causal: bool, bounds: tuple[int, ...]) -> str:
    """Return a line for each rank: its positions, and for each step "source: visible pairs"."""
    work = pairs(layout, causal, bounds)
    rows = []
    for rank in range(layout.size):
        held = ", ".join(f"{part.start}-{part.stop - 1}" for part in layout.ranges(rank)) or "none"
        cells = [
            f"{step.source}: {done}" for step, done in zip(steps(layout, rank, causal, bounds), work[rank], strict=True)
        ]
        rows.append([f"rank {rank}", held, *cells, str(sum(work[rank]))])
    head = ["", "positions", *(f"step {step}" for step in range(layout.size)), "pairs"]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )
