"""Render the programs of all ranks as a grid of text: time runs down, one column for each rank.

→1:0-3   send the chunks 0 to 3 to rank 1            4⇒8   copy chunk 4 over chunk 8
←2:5     receive chunk 5 from rank 2, over it        ·     no chunks, an empty message
←2:5+    receive chunk 5 from rank 2 and add it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from commlib.schedule.ir import Copy, Program, Recv, Send, Span
from commlib.schedule.replay import PostedRound, replay


def render(programs: Sequence[Program]) -> str:
    """Return the grid of a collective, given the programs of all ranks in rank order.

    A message appears in the same row at both ends: the row in which its later end is posted, if every row takes one
    tick. Programs that deadlock are drawn too; the blocked operations are in the last row.
    """
    cells, stuck = _place(programs)
    rows = [["step", *(f"rank {program.rank}" for program in programs)]]
    rows += [[str(tick), *(" ".join(cells[tick, program.rank]) for program in programs)] for tick in _ticks(cells)]
    if stuck:
        rows.append(["stuck", *(" ".join(stuck.get(program.rank, ())) for program in programs)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = (" │ ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([_title(programs[0]), *table]) + "\n"


def _title(program: Program) -> str:
    regions = (str(Span(*edges)) for edges in pairwise((0, *accumulate(program.regions))))
    chunks = f", chunks {' | '.join(regions)}" if program.regions else ""
    root = f", root {program.root}" if program.verb in ("broadcast", "reduce", "gather", "scatter") else ""
    ranks = f"{program.size} rank{'s' * (program.size > 1)}"
    return f"{program.verb} {program.algorithm}, {ranks}{root}{chunks}"


def _ticks(cells: dict[tuple[int, int], list[str]]) -> range:
    return range(1 + max((tick for tick, _ in cells), default=-1))


def _place(programs: Sequence[Program]) -> tuple[dict[tuple[int, int], list[str]], dict[int, list[str]]]:
    """Return the content of each cell (tick, rank), and the blocked operations of each rank."""
    cells: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    now = [0] * len(programs)
    posted_at: dict[PostedRound, int] = {}

    def posted(step: PostedRound) -> None:
        posted_at[step] = now[step.rank]

    def ended(step: PostedRound) -> None:
        mine = posted_at[step]
        items: list[tuple[int, Copy | Send | Recv]] = [(mine, copy) for copy in step.round.copies]
        for send, receiver in zip(step.round.sends, step.outbox, strict=True):
            items.append((max(mine, posted_at[receiver]) if receiver else mine, send))
        for recv, origin in zip(step.round.recvs, step.inbox, strict=True):
            items.append((max(mine, posted_at[origin[0]]) if origin else mine, recv))
        for tick, item in items:
            cells[tick, step.rank].append(_text(item))
        now[step.rank] = 1 + max((tick for tick, _ in items), default=mine)

    blocked = replay([program.rounds for program in programs], posted, ended)
    return cells, {step.rank: [_text(end) for end in step.waits] for step in blocked}


def _text(item: Copy | Send | Recv) -> str:
    match item:
        case Copy(source, target):
            return f"{source}⇒{target}"
        case Send(peer, span):
            return f"→{peer}:{span}"
        case Recv(peer, span, reduce):
            return f"←{peer}:{span}{'+' if reduce else ''}"
