"""Session: the contenders of a run, and the measurement of rows. It prints nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib.bench import cases, commlib_contender, gloo_peer, mpi_peer
from commlib.bench.cases import Case
from commlib.bench.measure import Call, burst_of, memory_pass, rounds, wrong_elements
from commlib.bench.mpi_peer import UnsupportedPeerError
from commlib.bench.options import BenchOptionsError, BenchSettings
from commlib.bench.rows import BOUND_FROM, OURS, BenchRow, percentiles
from commlib.errors import UsageError

Make = Callable[[Case], Call]
Tell = Callable[[Case, int], None]  # called with the case and the number of finished rounds
_CANNOT = (UsageError, UnsupportedPeerError, MPI.Exception, RuntimeError, TypeError, ValueError)  # raised by contenders


def agree(world: Any, problem: str | None) -> None:
    """Raise Refused on all ranks if any of them has a problem. Collective."""
    found = [text for text in world.allgather(problem) if text is not None]
    if found:
        raise BenchOptionsError(found[0])


def _silent(case: Case, done: int) -> None:
    pass


class Session:
    """Measures rows, in order. All ranks make one, with the same settings, and iterate over it together."""

    def __init__(self, comm: Any, world: Any, settings: BenchSettings, *, bound: bool = True) -> None:
        """bound: also measure the memory passes that give the bound."""
        self.comm, self.world, self.settings = comm, world, settings
        self.notes: list[str] = []  # unsupported dtypes and operations of peers, with the reason
        self.has_bound = bound and comm.one_node and comm.size > 1
        peers: dict[str, Make] = {
            "mpi": partial(mpi_peer.call, world),
            "pieces": partial(mpi_peer.pieces, world),
            "gloo": gloo_peer.call,
        }
        make_ours = partial(
            commlib_contender.call,
            comm,
            algorithm=settings.algorithm,
            plan=settings.plan,
            asynchronous=settings.asynchronous,
        )
        self.makers: dict[str, Make] = {OURS: make_ours, **{name: peers[name] for name in settings.peers}}
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

    def case(self, dtype: str, op: str, nbytes: int) -> Case:
        """Allocate the arrays of a row. Collective."""
        return cases.make(
            self.settings.verb.name,
            rank=self.comm.rank,
            size=self.comm.size,
            allocate=self.comm.empty if self.settings.symmetric else np.empty,
            nbytes=nbytes,
            dtype=dtype,
            op=op,
            root=self.settings.root,
            in_place=self.settings.in_place,
        )

    def probe(self) -> None:
        """Run every contender once on the smallest data; note failures. Raises Refused if commlib itself fails."""
        for dtype, op in self.kinds():
            case = self.case(dtype, op, 0)
            case.clear()
            for name in self.makers:
                reason = self._why_not(name, case)
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
        except _CANNOT as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return None

    def contenders(self, case: Case) -> dict[str, Call]:
        """Return the calls of all contenders that support this case."""
        calls = {}
        for name, make in self.makers.items():
            if (name, case.dtype, case.op) not in self._unable:
                try:
                    calls[name] = make(case)
                except UnsupportedPeerError:  # pieces of a small array
                    continue
        return calls

    def rows(self, tell: Tell = _silent) -> Iterator[BenchRow]:
        """Measure row after row. Collective."""
        for dtype, op, nbytes in self.plan():
            yield self.row(self.case(dtype, op, nbytes), tell)
            gc.collect()  # frees symmetric memory without references

    def row(self, case: Case, tell: Tell = _silent) -> BenchRow:
        """Measure one row. Check the results before the bursts, and again after them."""
        tell(case, 0)
        calls = self.contenders(case)
        wrong = {name: self._wrong(case, call) for name, call in calls.items()}
        case.clear()
        rewrite = case.rewrite if self.settings.fresh else None
        single: dict[str, list[float]] = {name: [] for name in calls}
        bursts = {
            name: burst_of(
                self.world,
                call,
                rewrite,
                iters=self.settings.iters,
                warm_up=self.settings.warmup_iters,
                single=single[name] if self.settings.percentiles else None,
            )
            for name, call in calls.items()
        }
        if self.has_bound and case.nbytes >= BOUND_FROM:
            bound = case.verb.bound(case.nbytes, case.size, in_place=case.in_place)
            bursts["bound"] = burst_of(self.world, memory_pass(*bound))
        times: dict[str, list[float]] = {name: [] for name in bursts}
        for number, figures in enumerate(rounds(bursts, self.settings.rounds), 1):
            for name, seconds in figures.items():
                times[name].append(seconds)
            tell(case, number)
        for name, call in calls.items():
            wrong[name] += self._wrong(case, call)
        return BenchRow(
            verb=case.verb.name,
            ranks=case.size,
            dtype=case.dtype if case.nbytes else "",
            op=case.op,
            root=case.root if case.verb.rooted else None,
            size=case.nbytes,
            count=case.count,
            seconds={name: times[name] for name in calls},
            wrong=wrong if self.settings.check else None,
            bound_seconds=times.get("bound", []),
            in_place=case.in_place if case.nbytes else None,
            percentiles={name: percentiles(found) for name, found in single.items() if found},
        )

    def _wrong(self, case: Case, call: Call) -> int:
        return wrong_elements(self.world, case, call) if self.settings.check else 0
