"""Ranks as threads, with just enough of a communicator for the engine: shared lists, barriers, numpy sums."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

TIMEOUT = 20.0


class FakeWork:
    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.seconds = 100.0  # pretends to have run that long

    def done(self) -> bool:
        return False  # pretends to be slow: later operations queue behind it

    def wait(self, timeout: float | None = None) -> Any:
        return self.future.result(timeout or TIMEOUT)


class FakePlan:
    def __init__(self, comm: FakeComm, x: np.ndarray, op: str) -> None:
        self.comm, self.x, self.op = comm, x, op

    def __call__(self) -> Any:
        self.comm.log.append(("inline", self.x.size))
        return self.run()

    def start(self) -> FakeWork:
        self.comm.log.append(("thread", self.x.size))
        work = FakeWork()
        self.comm.jobs.put((self.run, work))
        return work

    def run(self) -> np.ndarray:
        everyone = self.comm.exchange(self.x.copy())
        if len({x.size for x in everyone}) != 1:
            raise RuntimeError("ranks reduced different buckets")
        total = np.sum(np.stack(everyone), axis=0)
        self.x[:] = total / self.comm.size if self.op == "mean" else total
        return self.x


class FakeComm:
    """One rank of a `FakeWorld`."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.log: list[tuple[str, int]] = []
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self._progress, daemon=True)
        self.thread.start()

    def exchange(self, value: Any) -> list[Any]:
        world = self.world
        world.table[self.rank] = value
        world.barrier.wait(TIMEOUT)
        everyone = list(world.table)
        world.barrier.wait(TIMEOUT)
        return everyone

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.exchange(obj)

    def empty(self, shape: Any, dtype: Any = "float32") -> np.ndarray:
        return np.zeros(shape, dtype)

    def watch(self, text: str) -> Callable[[], None]:
        return lambda: None

    def plan_all_reduce(self, x: Any, op: str = "sum", *, out: Any = None) -> FakePlan:
        assert out is x, "the engine reduces in place"
        return FakePlan(self, x, op)

    def _progress(self) -> None:
        while (job := self.jobs.get()) is not None:
            run, work = job
            try:
                work.future.set_result(run())
            except BaseException as error:
                work.future.set_exception(error)


class FakeWorld:
    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def run(self, function: Callable[[FakeComm], Any]) -> list[Any]:
        """Call `function` on every rank, each on a thread of its own; return the results, or raise the first error."""
        comms = [FakeComm(self, rank) for rank in range(self.size)]

        def one(comm: FakeComm) -> Any:
            try:
                return function(comm)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, comm) for comm in comms]
        for comm in comms:
            comm.jobs.put(None)
        failures = [error for future in futures if (error := future.exception())]
        for failure in failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        if failures:
            raise failures[0]
        return [future.result() for future in futures]
