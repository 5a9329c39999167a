"""Text of the table: one block for each form and memory, the cells that miss their goal, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from commlib.bench.all_verbs.cells import MARKS, MEANINGS, Cell
from commlib.bench.all_verbs.goals import FORMS, GOALS, MEMORIES, Goal
from commlib.bench.load import busy_text
from commlib.console.text import bytes_text, columns

Grid = list[list[str]]


def head(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts that a reader needs to judge the times."""
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)}"
    yield f"# every verb, {ranks} on {', '.join(dict.fromkeys(facts['hosts']))}, {facts['mpi']}, {facts['date']}"
    yield f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']:.1f} at the start"
    if warning := busy_text(facts):
        yield f"# {warning}"


def lines(cells: Sequence[Cell], notes: Sequence[str], *, width: int | None) -> Iterator[str]:
    """Yield all tables, the cells without a good figure, the goals and the verdict."""
    for form, memory in product(FORMS, MEMORIES):
        chosen = [cell for cell in cells if (cell.form, cell.memory) == (form, memory)]
        if chosen:
            yield f"\n{form}, {memory} arrays: microseconds, commlib:MPI"
            yield columns(grid(chosen, behind="!"), left=0, width=width)
    yield ""
    yield from ("# " + note for note in notes)
    yield "# " + legend(cells, "! misses the goal")
    for cell in cells:
        if cell.status != "good":
            yield f"{cell.status}: {cell.name}: {reason(cell)}"
    yield "# goals, commlib's time / MPI's: " + "; ".join(map(goal_text, GOALS))
    yield "# " + verdict(cells)


def grid(cells: Sequence[Cell], *, around: str = "", behind: str = "") -> Grid:
    """Return the cells of one form and memory: a line of verbs, then a line for each size.

    around, behind: put on both sides of, and behind, a cell that is slow, wrong or failed.
    """
    verbs, sizes = dict.fromkeys(cell.verb for cell in cells), sorted({cell.nbytes for cell in cells})
    texts = {
        (cell.verb, cell.nbytes): cell.text()
        if cell.status in ("good", "unmeasured")
        else f"{around}{cell.text()}{around}{behind}"
        for cell in cells
    }
    rows = [[bytes_text(size) if size else "-", *(texts.get((verb, size), "") for verb in verbs)] for size in sizes]
    return [["bytes", *verbs], *rows]


def legend(cells: Sequence[Cell], marked: str) -> str:
    """Return the meaning of the marks that occur."""
    used = dict.fromkeys(MARKS[cell.best] for cell in cells if cell.peers)
    return ", ".join([marked, *(f"{mark} {MEANINGS[mark]}" for mark in used if mark)])


def reason(cell: Cell) -> str:
    """Return why a cell is not good."""
    if cell.status == "slow":
        assert cell.share is not None
        return f"{cell.text()} us, {cell.share:.2f} times {cell.best}, goal {cell.goal:.2f}"
    if cell.status == "wrong":
        return f"{cell.wrong} wrong elements"
    return "no time was left (--seconds)" if cell.status == "unmeasured" else "see the remark above"


def goal_text(goal: Goal) -> str:
    """Return one goal in words."""
    sizes = ""
    if goal.least:
        sizes = f"from {bytes_text(goal.least)}"
        if goal.most < 1 << 62:
            sizes += f" to {bytes_text(goal.most)}"
    words = " ".join(filter(None, [goal.memory, goal.form, goal.verb, sizes]))
    return f"{words or 'all'} {goal.share:.2f}"


def verdict(cells: Sequence[Cell]) -> str:
    """Return the number of cells by status."""
    counts = Counter(cell.status for cell in cells)
    others = [f"{number} {status}" for status, number in counts.items() if status != "good"]
    return ", ".join([f"{counts['good']} of {len(cells)} cells reach the goal", *others])
