"""Measure one case of a sweep, and report how it ended. An error on all ranks is a result, too."""

from __future__ import annotations

import faulthandler
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from commlib.bench import options
from commlib.bench.memory import HOST, BenchMemory
from commlib.bench.options import BenchOptions, BenchOptionsError
from commlib.bench.rows import mistakes
from commlib.bench.session import Session
from commlib.bench.sweep.plan import SweepCase, SweepPlan
from commlib.bench.sweep.results import Line
from commlib.bench.sweep.worlds import SweepWorld, wait_asleep
from commlib.errors import PeerError, ShutdownError, StallError

MOST_BEGINNINGS = 2  # a case that has ended the job this often is skipped
PATIENCE = 30.0  # seconds within which the other ranks must have failed, too
_HOPELESS = (PeerError, ShutdownError, StallError)  # a rank has exited, or this rank's group is unusable


def measure(world: SweepWorld, case: SweepCase, plan: SweepPlan, memory: BenchMemory = HOST) -> Line:
    """Return the line of a case, with arrays in `memory`. Collective over the world; the same on all of its ranks.

    status: "ok", "wrong" (commlib returned a wrong element), "refused" (impossible; see the reason) or "failed"
    (an error on every rank). An error on only some ranks is raised on them, and ends the job.
    """
    began = time.perf_counter()
    row: dict[str, Any] | None = None
    notes: list[str] = []
    status, reason = "ok", ""
    with _limited(plan.case_seconds, case.name if world.comm.rank == 0 else ""):
        try:
            settings = options.check(_options(case, plan), world.comm.size)
            session = Session(world.comm, world.world, settings, memory=memory)
            session.probe()
            notes = session.notes
            bench_row = session.row(session.case(case.dtype or "float32", case.op, case.nbytes))
            row = bench_row.figures()
            status = "wrong" if mistakes([bench_row]) else "ok"
            wait_asleep(world.control.Ibarrier())
        except _HOPELESS:
            raise
        except Exception as error:
            if not wait_asleep(world.control.Ibarrier(), PATIENCE):
                raise  # the others wait for this rank elsewhere, which this rank cannot repair
            is_refused = isinstance(error, BenchOptionsError)
            status = "refused" if is_refused else "failed"
            reason = str(error) if is_refused else f"rank {world.comm.rank}: {_first_line(error)}"
    gc.collect()  # frees symmetric memory without references
    endings = world.control.allgather((status, reason))
    worst = next((ending for name in ("failed", "refused", "wrong") for ending in endings if ending[0] == name), None)
    if worst is not None:
        status, reason = worst
    row = row if status in ("ok", "wrong") else None
    return make_line(case, status, reason, notes=notes, row=row, took=time.perf_counter() - began)


def make_failed_line(case: SweepCase, reason: str) -> Line:
    """Return the line of a case that failed; the reason comes from an earlier job."""
    return make_line(case, "failed", reason, notes=[], row=None, took=0.0)


def make_line(case: SweepCase, status: str, reason: str, **more: Any) -> Line:
    """Return the line of a case that has just ended."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    what = {"kind": "case", "key": case.key, "name": case.name, "case": asdict(case)}
    return {**what, "status": status, "reason": reason, **more, "date": date}


def _options(case: SweepCase, plan: SweepPlan) -> BenchOptions:
    has_data = bool(case.nbytes)
    return BenchOptions(
        verb=case.verb,
        sizes=(case.nbytes,) if has_data else None,
        dtypes=(case.dtype,) if has_data else None,
        ops=(case.op,) if case.op else None,
        peers=case.peers,
        in_place=case.in_place if has_data else None,
        symmetric=case.symmetric if has_data else None,
        algorithm=case.algorithm if case.algorithm != "auto" else None,
        rounds=plan.rounds,
        iters=plan.iters,
        warmup_iters=plan.warmup_iters,
        check=plan.check,
        device=case.device,
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextmanager
def _limited(seconds: float, what: str) -> Iterator[None]:
    """End this process, with its stacks, if the block takes longer. MPI cannot be interrupted, so it ends the job.

    what: printed before that, unless it is "".
    """

    def warn() -> None:
        sys.stderr.write(
            f"commlib bench sweep: {what} takes more than {seconds:g} s (--case-seconds), so the job ends, with the "
            "stacks of its ranks. Start it again to continue; a case that ends it "
            f"{MOST_BEGINNINGS} times counts as failed.\n"
        )
        sys.stderr.flush()

    timer = threading.Timer(seconds, warn) if what else None
    faulthandler.dump_traceback_later(seconds + 1, exit=True)  # works even if a call holds the interpreter lock
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if timer is not None:
            timer.cancel()
