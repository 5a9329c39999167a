"""One run of `commlib bench pairs` on all ranks: check the options, measure, print, write the file."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from rich.console import Console

import commlib
from commlib.bench import pairs, pairs_report, record, table
from commlib.bench.load import busy_text
from commlib.bench.options import BenchOptions
from commlib.bench.run import folder_problem
from commlib.bench.session import agree
from commlib.console.progress import show_progress
from commlib.console.text import columns
from commlib.console.width import reader_width


def run(options: BenchOptions) -> bool:
    """Measure all pairs, print and write; return whether all bytes were right.

    Collective: all ranks pass the same options. Raises Refused on all of them for invalid options.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    sizes = pairs.check(options, comm.size)
    agree(world, folder_problem(options.out) if comm.rank == 0 else None)
    facts = record.gather_facts(world, one_node=comm.one_node)
    rows = table.console() if comm.rank == 0 else Console(quiet=True)
    remarks = Console(stderr=True, quiet=comm.rank != 0, highlight=False) if options.csv else rows

    def note(text: str) -> None:
        remarks.print(f"# {text}", style="dim", markup=False, soft_wrap=True)

    named = ", ".join(dict.fromkeys(facts["hosts"]))
    note(f"pairs, {comm.size} ranks on {named}, {facts['mpi']}, {facts['date']}")
    note(f"{facts['cpu']}, {facts['cores']} cores, load {facts['load']:.1f} at the start")
    if warning := busy_text(facts):
        note(warning)
    with show_progress("commlib bench pairs", silent=comm.rank != 0) as report:
        matrices, wrong = pairs.measure(comm, world, options, report)
    if options.csv:
        _print(rows, "\n".join(pairs_report.csv_lines(matrices, facts["hosts"])))
    for matrix in matrices:
        if not options.csv:
            note(pairs_report.headline(matrix))
            _print(rows, columns(pairs_report.cells(matrix, comm.size), left=0, width=reader_width()))
        note(pairs_report.summary(matrix, facts["hosts"]))
    note(f"wrong bytes: {wrong}" if options.check else "messages were not checked (--no-check)")
    if options.out is not None and comm.rank == 0:
        path = options.out / f"{record.file_name('pairs', facts)}.json"
        pairs_report.write(path, matrices, facts, {"sizes": sizes, "rounds": options.rounds, "iters": options.iters})
        note(f"wrote {path}")
    return wrong == 0


def _print(console: Any, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
