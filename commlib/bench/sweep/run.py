"""One sweep on all ranks: find the remaining cases, and measure them world by world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from mpi4py import MPI

import commlib
from commlib.bench import gloo_peer
from commlib.bench.options import BenchOptionsError
from commlib.bench.preparation import choose_memory, join_peers
from commlib.bench.session import agree
from commlib.bench.sweep import environment, report, worlds
from commlib.bench.sweep.measuring import MOST_BEGINNINGS, make_failed_line, measure
from commlib.bench.sweep.plan import SweepCase, SweepPlan, cases, to_table
from commlib.bench.sweep.results import FORMAT, Line, ResultsWriter
from commlib.console.progress import show_progress


def read_on_one(read: Callable[[], SweepPlan]) -> SweepPlan:
    """Return the plan read by rank 0: its file may not be on every node. Raises Refused on all ranks. Collective."""
    plan, problem = None, None
    if MPI.COMM_WORLD.rank == 0:
        try:
            plan = read()
        except BenchOptionsError as error:
            problem = str(error)
    agree(MPI.COMM_WORLD, problem)
    shared: SweepPlan = MPI.COMM_WORLD.bcast(plan)
    return shared


def run(plan: SweepPlan, out: Path, *, retry: bool = False) -> bool:
    """Measure the cases of a plan that a file lacks; return whether all of them are right.

    Collective: all ranks pass the same plan. retry: repeat cases that were wrong, refused or failed. Raises Refused on
    all ranks for invalid arguments, before any measurement.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    with ExitStack() as stack:  # on all ranks, before any measurement
        facts = {**environment.gather(comm, world), **choose_memory(stack, plan.device, comm).facts()}
    planned, unable = cases(plan, facts["ranks_of_nodes"])
    agree(world, gloo_peer.problem() if "gloo" in plan.peers else None)
    with ExitStack() as stack:
        writer = _opened(world, out)
        if writer is not None:
            stack.enter_context(writer)
        printer = report.SweepPrinter(silent=writer is None)
        if writer is not None:
            _head(writer, plan, facts, printer)
        left = world.bcast(None if writer is None else _left(writer, planned, retry, printer))
        printer.start(facts, planned, left, unable, out)
        endings = []
        show = stack.enter_context(show_progress("commlib bench sweep", silent=writer is None))
        for line in _measured(comm, world, plan, left, show, writer):
            endings.append(line["status"])
            printer.line(line)
        printer.end(endings, out, unmeasured=len(left) - len(endings))
    return bool(world.bcast("wrong" not in endings and "failed" not in endings))


def _opened(world: Any, out: Path) -> ResultsWriter | None:
    """Return rank 0's writer. Raises Refused on all ranks if the file cannot be opened. Collective."""
    writer, problem = None, None
    if world.rank == 0:
        try:
            writer = ResultsWriter(out)
        except BenchOptionsError as error:
            problem = str(error)
    agree(world, problem)
    return writer


def _head(writer: ResultsWriter, plan: SweepPlan, facts: dict[str, Any], printer: report.SweepPrinter) -> None:
    """Print remarks about the file, and write the environment if it differs from the last one in the file."""
    results = writer.results
    if writer.remark:
        printer.note(writer.remark)
    if results.torn:
        printer.note(f"{writer.path}: an incomplete last line is cut off, {results.torn} bytes: of a killed job")
    header: Line = {
        "kind": "environment",
        "number": len(results.environments),
        "format": FORMAT,
        "plan": to_table(plan),
    }
    if results.environments:
        last = results.environments[-1]
        changed = environment.differences(last["plan"], header["plan"])
        elsewhere = environment.differences(last["facts"], facts)
        if changed:
            printer.note("the plan has changed; cases that are still in it keep their results:", *changed)
        if elsewhere:
            printer.note("the environment has changed; later cases are marked with a new environment:", *elsewhere)
        if not (changed or elsewhere):
            return
    writer.add({**header, "facts": facts})


def _left(
    writer: ResultsWriter, planned: list[SweepCase], retry: bool, printer: report.SweepPrinter
) -> list[SweepCase]:
    """Return the cases that the file lacks, and those to repeat. A case that ends the job has failed."""
    results = writer.results
    for case in planned:
        if results.begun[case.key] >= MOST_BEGINNINGS:
            printer.note(f"{case.name}: ended the job {results.begun[case.key]} times, and counts as failed")
            writer.add(make_failed_line(case, f"the job ended {results.begun[case.key]} times during this case"))
    ended = {key for key, line in results.cases.items() if not retry or line["status"] == "ok"}
    return [case for case in planned if case.key not in ended]


def _measured(
    comm: Any,
    world: Any,
    plan: SweepPlan,
    remaining: list[SweepCase],
    show: Callable[[float, str], None],
    writer: ResultsWriter | None,
) -> Iterator[Line]:
    """Measure, and yield the line of each case on rank 0, which has the writer. Collective."""
    until = None if plan.seconds is None else time.monotonic() + plan.seconds
    done = 0
    for (nodes, ranks), group in groupby(remaining, lambda case: case.world):
        with worlds.enter_world(comm, world, nodes, ranks) as part, ExitStack() as stack:
            if part is None:
                continue
            memory = choose_memory(stack, plan.device, part.comm)
            join_peers(stack, plan.peers, part.comm, part.world)
            for case in group:
                if part.world.bcast(until is not None and time.monotonic() > until):
                    break
                show(done / len(remaining), case.name)
                done += 1
                if writer is not None:
                    writer.add({"kind": "begun", "key": case.key})
                line = measure(part, case, plan, memory)
                if writer is not None:
                    line["environment"] = writer.results.environments[-1]["number"]
                    writer.add(line)
                    yield line
    show(1.0, "done")
