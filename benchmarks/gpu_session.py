"""Session: run the contenders of the GPU benchmark in turn, in rounds, on all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpi4py import MPI

from benchmarks.gpu_contenders import PEERS, VerbTask, ours
from benchmarks.gpu_data import Check, VerbJob
from benchmarks.gpu_machine import Call, Machine

BURST_SECONDS, MOST = 0.05, 1000
BOUND_FROM = 1 << 20  # bytes; below, the cost of a call is the limit and not memory

Bound = Callable[[VerbJob], float]
"""Return the least possible seconds of a job."""


@dataclass(slots=True)
class ContenderRow:
    """One contender of one job. Seconds of a call of the slowest rank, one figure per round; 0 if unknown.

    events: by CUDA events on the stream of the caller; NaN for contenders with internal streams.
    """

    verb: str
    dtype: str
    size: int
    count: int
    ranks: int
    contender: str
    factor: float
    wrong: int = 0
    bound_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)

    def time(self) -> float:
        return statistics.median(self.seconds)

    def of_bound(self) -> float:
        return self.bound_seconds / self.time()

    def figures(self) -> dict[str, Any]:
        """Return everything for JSON."""
        algbw = self.size / self.time() / 1e9
        return {**asdict(self), "algbw": algbw, "busbw": algbw * self.factor, "of_bound": self.of_bound()}


class Session:
    """A session. own: commlib's contenders: by name, the memories (x, out) on which its verbs work."""

    def __init__(
        self,
        machine: Machine,
        comm: Any,
        world: Any,
        own: Mapping[str, tuple[Any, Any]],
        peers: Sequence[str],
        bound: Bound,
        *,
        rounds: int,
        until: float,
    ) -> None:
        """peers: these use the last memories of `own`. until: time.monotonic() after which no row begins."""
        self._machine, self._comm, self._world, self._own, self._bound = machine, comm, world, own, bound
        self._peers = {name: PEERS[name](machine, world) for name in peers}
        self._rounds, self._until = rounds, until
        self._unable: set[tuple[str, str, str]] = set()
        self.notes: list[str] = []

    def rows(self, jobs: Sequence[VerbJob]) -> Iterator[list[ContenderRow]]:
        """Measure job after job. Collective."""
        for job in jobs:
            if self._world.bcast(time.monotonic() > self._until):
                self.notes.append(f"no time left for {job.verb} {job.dtype} of {job.nbytes} bytes")
                continue
            yield self._measure(job)

    def _contenders(self, job: VerbJob) -> dict[str, tuple[VerbTask, Call, Call]]:
        """Return the task, a function to run it and one to wait for it, of each able contender. Collective."""
        made, finish = {}, self._machine.finish
        task = None
        for name, (x, out) in self._own.items():
            task = job.task(self._machine, x, out)
            made[name] = task, ours(self._comm, task), finish
        assert task is not None
        for name, peer in self._peers.items():
            if (name, job.verb, job.dtype) in self._unable:
                continue
            call, problem = None, ""
            try:
                call = peer.call(task)
                self._world.Barrier()
                call()
                peer.finish()
            except Exception as error:  # each library raises its own errors
                problem = f"{name}: no {job.verb} of {job.dtype} here: {(str(error) or repr(error)).splitlines()[0]}"
            if problems := [found for found in self._world.allgather(problem) if found]:
                self._unable.add((name, job.verb, job.dtype))
                self.notes.append(problems[0])
            elif call is not None:
                made[name] = task, call, peer.finish
        return made

    def _measure(self, job: VerbJob) -> list[ContenderRow]:
        contenders = self._contenders(job)
        bound = self._bound(job) if job.nbytes >= BOUND_FROM else 0.0
        common = job.verb, job.dtype, job.nbytes, job.count, job.ranks
        rows = {name: ContenderRow(*common, name, float(job.factor()), bound_seconds=bound) for name in contenders}
        for task, _, _ in contenders.values():  # zeros stay zeros, however often they are summed
            for array in (task.x, task.out):
                self._machine.device.kernels.fill(self._machine.device.wrap(array, "benchmark"), 0)
        calls = {name: self._burst(contenders[name]) for name in contenders}
        order = list(contenders)
        for _ in range(self._rounds):
            order = order[1:] + order[:1]
            for name in order:
                host, events = self._seconds(contenders[name], calls[name])
                rows[name].seconds.append(host)
                rows[name].events.append(events if name != "gloo" else float("nan"))
        check = Check.of(job, self._world.rank)
        for name, contender in contenders.items():
            rows[name].wrong = check.wrong(self._machine, self._world, *contender)
        return list(rows.values())

    def _burst(self, contender: tuple[VerbTask, Call, Call]) -> int:
        """Return the number of calls in a burst."""
        self._seconds(contender, 1)
        seconds, _ = self._seconds(contender, 2)
        return max(1, min(MOST if self._machine.is_real else 2, int(BURST_SECONDS / seconds)))

    def _seconds(self, contender: tuple[VerbTask, Call, Call], calls: int) -> tuple[float, float]:
        _, call, finish = contender
        self._machine.finish()
        self._world.Barrier()
        host, events = self._machine.seconds(call, calls, finish)
        return self._world.allreduce(host, MPI.MAX), self._world.allreduce(events, MPI.MAX)


def show(rows: Sequence[ContenderRow]) -> None:
    """Print a line for each contender: the columns of nccl-tests, and the ratio of its time to the first one's."""
    for row in rows:
        ratio = "" if row is rows[0] else f"{row.time() / rows[0].time():>10.1f}x"
        events, figures = statistics.median(row.events), row.figures()
        bound = f"{100 * row.of_bound():>8.0f} %" if row.bound_seconds else " " * 10
        event_text = f"{events * 1e6:>11.1f}" if events == events else " " * 11
        print(
            f"{row.size:>10}{row.count:>10}{row.dtype:>10}  {row.verb:<15}{row.contender:<11}{row.time() * 1e6:>11.1f}"
            f"{event_text}{figures['algbw']:>9.2f}{figures['busbw']:>9.2f}{bound}{row.wrong:>7}{ratio}",
            flush=True,
        )


HEADER = (
    f"{'size':>10}{'count':>10}{'type':>10}  {'verb':<15}{'contender':<11}{'time us':>11}{'event us':>11}{'algbw':>9}"
    f"{'busbw':>9}{'of bound':>10}{'wrong':>7}{'ratio':>11}"
)
