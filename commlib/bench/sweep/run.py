"""One sweep on all ranks: which cases are left, world by world, each written down as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

from mpi4py import MPI

import commlib
from commlib.bench import gloo_peer
from commlib.bench.options import Refused
from commlib.bench.session import agree
from commlib.bench.sweep import environment, report, worlds
from commlib.bench.sweep.measuring import MOST_BEGINNINGS, failed, measure
from commlib.bench.sweep.plan import Case, Plan, cases, table_of
from commlib.bench.sweep.results import FORMAT, Line, Writer
from commlib.console.progress import shown


def read_on_one(read: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 reads: its file may not be on every node. Raises Refused on all ranks. Collective."""
    plan, problem = None, None
    if MPI.COMM_WORLD.rank == 0:
        try:
            plan = read()
        except Refused as error:
            problem = str(error)
    agree(MPI.COMM_WORLD, problem)
    found: Plan = MPI.COMM_WORLD.bcast(plan)
    return found


def run(plan: Plan, out: Path, *, retry: bool = False) -> bool:
    """Measure what a file lacks of a plan; return whether all that was measured here is right.

    Collective: all ranks pass the same plan. retry: measure again what was wrong, refused or failed. Raises Refused on
    all ranks for what makes no sense, before anything is measured.
    """
    comm, world = commlib.init(), MPI.COMM_WORLD
    facts = environment.gather(comm, world)
    planned, unable = cases(plan, facts["ranks_of_nodes"])
    agree(world, gloo_peer.problem() if "gloo" in plan.peers else None)
    with ExitStack() as stack:
        writer = _opened(world, out)
        if writer is not None:
            stack.enter_context(writer)
        printer = report.Printer(silent=writer is None)
        if writer is not None:
            _head(writer, plan, facts, printer)
        left = world.bcast(None if writer is None else _left(writer, planned, retry, printer))
        printer.start(facts, planned, left, unable, out)
        endings = []
        tell = stack.enter_context(shown("commlib bench sweep", silent=writer is None))
        for line in _measured(comm, world, plan, left, tell, writer):
            endings.append(line["status"])
            printer.line(line)
        printer.end(endings, out)
    return bool(world.bcast("wrong" not in endings and "failed" not in endings))


def _opened(world: Any, out: Path) -> Writer | None:
    """Return rank 0's writer. Raises Refused on all ranks if there is none. Collective."""
    writer, problem = None, None
    if world.rank == 0:
        try:
            writer = Writer(out)
        except Refused as error:
            problem = str(error)
    agree(world, problem)
    return writer


def _head(writer: Writer, plan: Plan, facts: dict[str, Any], printer: report.Printer) -> None:
    """Say what is found in the file, and write where this is measured if that differs from what stands there."""
    found = writer.results
    if writer.remark:
        printer.note(writer.remark)
    if found.torn:
        printer.note(f"{writer.path}: half a line at its end is cut off, {found.torn} bytes: a case that was killed")
    header: Line = {"kind": "environment", "number": len(found.environments), "format": FORMAT, "plan": table_of(plan)}
    if found.environments:
        last = found.environments[-1]
        changed = environment.differences(last["plan"], header["plan"])
        elsewhere = environment.differences(last["facts"], facts)
        if changed:
            printer.note("the plan has changed; cases that are still in it keep their results:", *changed)
        if elsewhere:
            printer.note("the environment has changed; what follows is marked as measured in another one:", *elsewhere)
        if not (changed or elsewhere):
            return
    writer.add({**header, "facts": facts})


def _left(writer: Writer, planned: list[Case], retry: bool, printer: report.Printer) -> list[Case]:
    """Return the cases that the file lacks, and those to be tried again. A case that ends the job has failed."""
    found = writer.results
    for case in planned:
        if found.begun[case.key] >= MOST_BEGINNINGS:
            printer.note(f"{case.name}: ended the job {found.begun[case.key]} times, and counts as failed")
            writer.add(failed(case, f"the job ended {found.begun[case.key]} times while this was measured"))
    ended = {key for key, line in found.cases.items() if not retry or line["status"] == "ok"}
    return [case for case in planned if case.key not in ended]


def _measured(
    comm: Any, world: Any, plan: Plan, left: list[Case], tell: Callable[[float, str], None], writer: Writer | None
) -> Iterator[Line]:
    """Measure, and yield the line of each case on rank 0, which has the writer. Collective."""
    done = 0
    for (nodes, ranks), group in groupby(left, lambda case: case.world):
        with worlds.entered(comm, world, nodes, ranks) as part, ExitStack() as stack:
            if part is None:
                continue
            if "gloo" in plan.peers:
                stack.enter_context(gloo_peer.joined(part.world, one_node=part.comm.one_node))
            for case in group:
                tell(done / len(left), case.name)
                done += 1
                if writer is not None:
                    writer.add({"kind": "begun", "key": case.key})
                line = measure(part, case, plan)
                if writer is not None:
                    line["environment"] = writer.results.environments[-1]["number"]
                    writer.add(line)
                    yield line
    tell(1.0, "done")
