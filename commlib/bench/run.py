"""One run of the command on all ranks: check the options, measure, print, write the files."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpi4py import MPI

import commlib
from commlib.bench import gloo_peer, plot, record
from commlib.bench.formats.base import Heading
from commlib.bench.formats.run_tables import find_format
from commlib.bench.options import BenchOptions, BenchSettings, check
from commlib.bench.preparation import choose_memory, join_peers
from commlib.bench.report import Report
from commlib.bench.rows import BenchRow, mistakes
from commlib.bench.session import Session, agree


def run(options: BenchOptions) -> bool:
    """Measure, print and write; return whether every element of commlib's results was right.

    Collective: all ranks pass the same options. Raises Refused on all of them for invalid options.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    settings = check(options, comm.size)
    agree(world, _problem(settings, comm.rank))
    with ExitStack() as stack:
        memory = choose_memory(stack, settings.device, comm)
        join_peers(stack, settings.peers, comm, world)
        sessions = [Session(comm, world, replace(settings, in_place=place), memory=memory) for place in settings.places]
        for session in sessions:
            session.probe()
        notes = list(dict.fromkeys(note for session in sessions for note in session.notes))
        facts = {**record.gather_facts(world, one_node=comm.one_node), **memory.facts()}
        rounds = sum(len(session.plan()) for session in sessions) * settings.rounds
        with Report.on_rank(comm.rank, settings, rounds=rounds, bound=sessions[0].has_bound) as report:
            report.facts(facts)
            for note in notes:
                report.note(note)
            if settings.format is not None:
                report.write_as(find_format(settings.format, _heading(settings, facts, world)))
            rows: list[BenchRow] = []
            for case_rows in zip(*(session.rows(report.progress) for session in sessions), strict=True):
                rows += case_rows
                report.row(*case_rows)
            report.end()
        report.note(f"wrong elements: {mistakes(rows)}" if settings.check else "results were not checked (--no-check)")
        if settings.out is not None and comm.rank == 0:
            for text in write_files(settings, facts, rows, notes):
                report.note(text)
    return mistakes(rows) == 0


def _heading(settings: BenchSettings, facts: dict[str, Any], world: Any) -> Heading:
    """Return the heading of rows in another format. Collective."""
    return Heading(
        verb=settings.verb.name,
        sizes=settings.sizes,
        iters=settings.iters or 0,
        warmup_iters=settings.warmup_iters or 0,
        is_checked=settings.check,
        facts=facts,
        pids=world.allgather(os.getpid()),
    )


def _problem(settings: BenchSettings, rank: int) -> str | None:
    """Return the reason why this rank cannot run these settings, or None."""
    if "gloo" in settings.peers and (problem := gloo_peer.problem()):
        return problem
    return folder_problem(settings.out) if rank == 0 else None


def folder_problem(out: Path | None) -> str | None:
    """Create the folder of --out, if given; return an error text, or None."""
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out}: cannot make this folder: {error.strerror}"
    return None if os.access(out, os.W_OK) else f"--out {out}: cannot write to this folder"


def write_files(settings: BenchSettings, facts: dict[str, Any], rows: list[BenchRow], notes: list[str]) -> list[str]:
    """Write the JSON and the PNG to the folder, and return remarks about them."""
    assert settings.out is not None
    path = settings.out / record.stem(settings, facts)
    data, picture = path.with_suffix(".json"), path.with_suffix(".png")
    figures = [row.figures() for row in rows]
    options = record.options_of(settings)
    record.write(data, f"commlib bench {settings.verb.name}", facts, options, notes=notes, rows=figures)
    if not plot.can_plot():
        return [f"wrote {data}", plot.MISSING]
    plot.write(picture, rows, record.heading(settings, facts))
    return [f"wrote {data}", f"wrote {picture}"]
