"""Session: the contenders of a run, and the measurement of rows. It prints nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from mpi4py import MPI

from commlib.bench import cases, commlib_contender, gloo_peer, mpi_peer, nccl_peer
from commlib.bench.cases import Case, wrong_elements
from commlib.bench.measure import Burst, Call, Timer, burst_of, rounds
from commlib.bench.memory import HOST, BenchMemory
from commlib.bench.mpi_peer import UnsupportedPeerError
from commlib.bench.options import BenchOptionsError, BenchSettings
from commlib.bench.rows import OURS, BenchRow, percentiles
from commlib.errors import UsageError

Make = Callable[[Case], Call]
CaseReport = Callable[[Case, int], None]  # called with the case and the number of finished rounds
FEWEST_ROUNDS = 5  # of a row with a limited time
_CANNOT = (UsageError, UnsupportedPeerError, MPI.Exception, RuntimeError, TypeError, ValueError)  # raised by contenders


def agree(world: Any, problem: str | None) -> None:
    """Raise Refused on all ranks if any of them has a problem. Collective."""
    problems = [text for text in world.allgather(problem) if text is not None]
    if problems:
        raise BenchOptionsError(problems[0])


def _silent(case: Case, done: int) -> None:
    pass


class Session:
    """Measures rows, in order. All ranks make one, with the same settings, and iterate over it together."""

    def __init__(
        self,
        comm: Any,
        world: Any,
        settings: BenchSettings,
        *,
        memory: BenchMemory = HOST,
        bound: bool = True,
        makers: Mapping[str, Make] | None = None,
    ) -> None:
        """Choose the contenders. Collective.

        memory: of the arrays. bound: also measure the traffic of memory that gives the bound. makers: contenders
        instead of commlib and the settings' peers.
        """
        self.comm, self.world, self.settings, self.memory = comm, world, settings, memory
        self.notes: list[str] = []  # unsupported dtypes and operations of peers, with the reason
        self.has_bound = bound and memory.has_bound(comm, world)
        make_ours = partial(
            commlib_contender.call,
            comm,
            algorithm=settings.algorithm,
            plan=settings.plan,
            asynchronous=settings.asynchronous,
        )
        peers: dict[str, Make] = {
            "mpi": partial(mpi_peer.call, world),
            "pieces": partial(mpi_peer.pieces, world),
            "gloo": gloo_peer.call,
            "nccl": nccl_peer.call,
            "ordinary": make_ours,
        }
        self.makers: dict[str, Make] = {OURS: make_ours, **{name: peers[name] for name in settings.peers}}
        if makers is not None:
            self.makers = dict(makers)
        self._unable: set[tuple[str, str, str]] = set()  # (contender, dtype, op)

    def kinds(self) -> list[tuple[str, str]]:
        """Return every dtype with every operation."""
        return [(dtype, op) for dtype in self.settings.dtypes for op in self.settings.ops]

    def plan(self) -> list[tuple[str, str, int]]:
        """Return dtype, operation and bytes of each row. Sizes below one element per rank are merged into one."""
        planned: dict[tuple[str, str, int], tuple[str, str, int]] = {}
        for dtype, op in self.kinds():
            for nbytes in self.settings.sizes:
                count = cases.count_of(self.settings.verb, dtype, nbytes, self.comm.size)
                planned.setdefault((dtype, op, count), (dtype, op, nbytes))
        return list(planned.values())

    def case(self, dtype: str, op: str, nbytes: int, *, symmetric: bool = True) -> Case:
        """Allocate the arrays of a row; symmetric: in symmetric memory, if the settings say so. Collective."""
        is_symmetric = symmetric and self.settings.symmetric
        return cases.make(
            self.settings.verb.name,
            rank=self.comm.rank,
            size=self.comm.size,
            allocate=partial(self.memory.allocate, self.comm, symmetric=is_symmetric),
            nbytes=nbytes,
            dtype=dtype,
            op=op,
            root=self.settings.root,
            in_place=self.settings.in_place,
            memory=self.memory,
        )

    def own_cases(self, case: Case) -> dict[str, Case]:
        """Return the case of each contender. Peers use ordinary arrays on a GPU, and commlib's own on the host."""
        if not self.settings.symmetric or (self.memory is HOST and "ordinary" not in self.makers):
            return dict.fromkeys(self.makers, case)
        ordinary = self.case(case.dtype, case.op, case.nbytes, symmetric=False)
        shares = (OURS,) if self.memory is not HOST else [name for name in self.makers if name != "ordinary"]
        return {name: case if name in shares else ordinary for name in self.makers}

    def probe(self) -> None:
        """Run every contender once on the smallest data; note failures. Raises Refused if commlib itself fails."""
        for dtype, op in self.kinds():
            case = self.case(dtype, op, 0)
            for name, own in self.own_cases(case).items():
                own.clear()
                reason = self._why_not(name, own)
                if name == OURS:
                    agree(self.world, reason)
                elif any(reasons := self.world.allgather(reason)):
                    self._unable.add((name, dtype, op))
                    what = " ".join(filter(None, [dtype if case.nbytes else "", op]))
                    self.notes.append(f"{name}: no {what} here: {next(filter(None, reasons))}")

    def _why_not(self, name: str, case: Case) -> str | None:
        # One piece is the same as mpi, and a small array has only one.
        make = partial(mpi_peer.call, self.world) if name == "pieces" else self.makers[name]
        try:
            make(case)()
            self.memory.timer(name).finish()
        except _CANNOT as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return None

    def contenders(self, case: Case) -> dict[str, tuple[Case, Call]]:
        """Return the case and the call of each contender that supports this case. Collective."""
        result = {}
        for name, own in self.own_cases(case).items():
            if (name, case.dtype, case.op) not in self._unable:
                try:
                    result[name] = own, self.makers[name](own)
                except UnsupportedPeerError:  # pieces of a small array
                    continue
        return result

    def rows(self, report: CaseReport = _silent) -> Iterator[BenchRow]:
        """Measure row after row. Collective."""
        for dtype, op, nbytes in self.plan():
            yield self.row(self.case(dtype, op, nbytes), report)
            gc.collect()  # frees symmetric memory without references

    def row(self, case: Case, report: CaseReport = _silent, *, until: float | None = None) -> BenchRow:
        """Measure one row. Check the results before the bursts, and again after them.

        until: the time, on rank 0's monotonic clock, after which to begin no further round than FEWEST_ROUNDS.
        """
        report(case, 0)
        contenders = self.contenders(case)
        timers = {name: self.memory.timer(name) for name in contenders}
        wrong = {name: self._wrong(own, call, timers[name]) for name, (own, call) in contenders.items()}
        for own, _ in contenders.values():
            own.clear()
        single: dict[str, list[float]] = {name: [] for name in contenders}
        bursts = {name: self._burst(own, call, timers[name], single[name]) for name, (own, call) in contenders.items()}
        if self.has_bound and case.nbytes >= self.memory.bound_from:
            bound = case.verb.bound(case.nbytes, case.size, in_place=case.in_place)
            bursts["bound"] = burst_of(self.world, self.memory.traffic(*bound), timer=self.memory.timer("bound"))
        times: dict[str, list[float]] = {name: [] for name in bursts}
        for number, figures in enumerate(rounds(bursts, self.settings.rounds), 1):
            for name, seconds in figures.items():
                times[name].append(seconds)
            report(case, number)
            if until is not None and number >= FEWEST_ROUNDS and self.world.bcast(time.monotonic() > until):
                break
        for name, (own, call) in contenders.items():
            wrong[name] += self._wrong(own, call, timers[name])
        return BenchRow(
            verb=case.verb.name,
            ranks=case.size,
            dtype=case.dtype if case.nbytes else "",
            op=case.op,
            root=case.root if case.verb.rooted else None,
            size=case.nbytes,
            count=case.count,
            seconds={name: times[name] for name in contenders},
            wrong=wrong if self.settings.check else None,
            bound_seconds=times.get("bound", []),
            in_place=case.in_place if case.nbytes else None,
            percentiles={name: percentiles(samples) for name, samples in single.items() if samples},
            events=self._events(timers),
        )

    def _burst(self, case: Case, call: Call, timer: Timer, single: list[float]) -> Burst:
        """Return the bursts of a contender. single: gets the time of each call, if the settings ask for percentiles."""
        settings = self.settings
        if (settings.fresh or settings.percentiles) and self.memory is not HOST:
            call = _completed(call, timer)
        return burst_of(
            self.world,
            call,
            case.rewrite if settings.fresh else None,
            iters=settings.iters,
            warm_up=settings.warmup_iters,
            single=single if settings.percentiles else None,
            timer=timer,
        )

    def _events(self, timers: dict[str, Timer]) -> dict[str, list[float]]:
        """Return the times of the last bursts by a GPU's events, on the slowest rank, by contender. Collective."""
        slowest = {}
        for name, timer in timers.items():
            last = getattr(timer, "events", [])[-self.settings.rounds :]
            if last and not (self.settings.fresh or self.settings.percentiles):
                slowest[name] = [max(each) for each in zip(*self.world.allgather(last), strict=True)]
        return slowest

    def _wrong(self, case: Case, call: Call, timer: Timer) -> int:
        return wrong_elements(self.world, case, call, timer) if self.settings.check else 0


def _completed(call: Call, timer: Timer) -> Call:
    """Return a call that also waits for the work that it queues."""

    def run() -> None:
        call()
        timer.finish()

    return run
