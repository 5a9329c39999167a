"""One run of `commlib bench all` on all ranks: measure row after row, print the tables, write the file."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from mpi4py import MPI
from rich.console import Console

import commlib
from commlib.bench import options, record, table
from commlib.bench.all_verbs import text
from commlib.bench.all_verbs.cells import BENCHMARK, find_cells
from commlib.bench.all_verbs.contenders import make_contenders
from commlib.bench.all_verbs.selection import Selection, TableRow
from commlib.bench.options import BenchOptions
from commlib.bench.rows import BenchRow
from commlib.bench.session import Session, agree
from commlib.bench.verbs import VERBS
from commlib.console.progress import show_progress
from commlib.console.width import reader_width

Row = dict[str, Any]
DIGITS = 4  # of a time in the file


def run(selection: Selection) -> tuple[bool, bool]:
    """Measure, print and write; return whether all results were right, and whether all cells reach their goals.

    Collective: all ranks pass the same selection. Raises BenchOptionsError on all of them if the file cannot be
    written.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    agree(world, _file_problem(selection) if comm.rank == 0 else None)
    facts = record.gather_facts(world, one_node=comm.one_node)
    console = table.console() if comm.rank == 0 else Console(quiet=True)
    for line in text.head(facts):
        console.print(line, markup=False, soft_wrap=True)
    notes: list[str] = []
    with show_progress("commlib bench all", selection.seconds, silent=comm.rank != 0) as report:
        rows = _measure(comm, world, selection, notes, report)
    given = {name: getattr(selection, name) for name in ("verbs", "sizes", "forms", "memories", "seconds", "rounds")}
    kept = {"benchmark": BENCHMARK, "facts": facts, "options": given, "notes": notes, "rows": rows}
    cells = find_cells(kept)
    for line in text.lines(cells, notes, width=reader_width()):
        console.print(line, markup=False, soft_wrap=True)
    if selection.json is not None and comm.rank == 0:
        record.write(selection.json, BENCHMARK, facts, given, notes=notes, rows=rows)
        console.print(f"# wrote {selection.json}", markup=False, soft_wrap=True)
    endings = {cell.status for cell in cells}
    return not endings & {"wrong", "failed"}, endings <= {"good"}


def _file_problem(selection: Selection) -> str | None:
    """Return the reason why the file cannot be written, or None."""
    if selection.json is None:
        return None
    folder = selection.json.parent
    if not folder.is_dir() or selection.json.is_dir() or not os.access(folder, os.W_OK):
        return f"--json {selection.json}: cannot write this file"
    return None


def _measure(
    comm: Any, world: Any, selection: Selection, notes: list[str], report: Callable[[float, str], None]
) -> list[Row]:
    """Return a row for every row of the selection, without seconds where no time was left. Collective."""
    planned = selection.rows()
    start, measured = time.monotonic(), list[Row]()
    for (verb, memory), group in groupby(planned, lambda row: (row.verb, row.memory)):
        session = _session(comm, world, selection, verb, memory)
        if world.bcast(time.monotonic() < start + selection.seconds):
            session.probe()
            notes += [f"{verb}, {memory}: {note}" for note in session.notes]
        for row in group:
            report(len(measured) / len(planned), f"{verb} {row.nbytes} B, {memory}")
            bench_row = None
            if world.bcast(time.monotonic() < start + selection.seconds):
                until = start + selection.seconds * (len(measured) + 1) / len(planned)
                bench_row = session.row(session.case("float32", session.settings.ops[0], row.nbytes), until=until)
                gc.collect()  # frees symmetric memory without references
            measured.append(_kept(row, bench_row))
    return measured


def _session(comm: Any, world: Any, selection: Selection, verb: str, memory: str) -> Session:
    """Return the session of one verb, out of place where it has such a form."""
    kind = VERBS[verb]
    asked = BenchOptions(
        verb,
        in_place=None if kind.in_place == "only" else False,
        symmetric=None if verb == "barrier" else memory == "symmetric",
        rounds=selection.rounds,
    )
    makers = make_contenders(comm, world, kind, selection.forms)
    return Session(comm, world, options.check(asked, comm.size), bound=False, makers=makers)


def _kept(row: TableRow, measured: BenchRow | None) -> Row:
    """Return a row for the file. bytes: as requested; size: of the arrays, of at least one element for each rank."""
    kept: Row = {"verb": row.verb, "memory": row.memory, "bytes": row.nbytes, "size": 0, "seconds": {}, "wrong": {}}
    if measured is None:
        return kept
    seconds = {name: [float(f"{time:.{DIGITS}g}") for time in times] for name, times in measured.seconds.items()}
    return {**kept, "size": measured.size, "seconds": seconds, "wrong": measured.wrong}
