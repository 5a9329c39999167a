"""Machine: the GPU of this rank for the GPU benchmarks, or for a dry run the tests' emulated GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from commlib.bench.gpu_memory import GpuMemory, GpuTimer
from commlib.cost.gpus import H100, all_reduce_seconds
from commlib.dtypes import NUMPY, Array
from commlib.errors import UsageError

Call = Callable[[], Any]

NO_GPU = (
    "{error}; --tiny runs everything on an emulated GPU in host memory, whose figures mean nothing. PREDICTED, not "
    "measured, for all_reduce on one H100 shared by the ranks:\n{predicted}"
)


def predicted() -> str:
    """Return the cost model's prediction for a GPU, as a table."""
    lines = ["ranks        bytes   symmetric us    ordinary us"]
    for ranks in (2, 4):
        for nbytes in (4 << 10, 1 << 20, 256 << 20):
            seconds = [
                all_reduce_seconds(nbytes, ranks, H100, one_gpu=True, symmetric=symmetric)
                for symmetric in (True, False)
            ]
            lines.append(f"{ranks:5d} {nbytes:12d} {seconds[0] * 1e6:14.1f} {seconds[1] * 1e6:14.1f}")
    return "\n".join(lines)


class Machine(GpuMemory):
    """A GPU or its emulation."""

    def __init__(self, comm: Any, *, tiny: bool) -> None:
        """tiny: emulate a GPU. Without tiny, ends the program if a rank has no GPU. Collective."""
        if tiny:
            from tests.cuda import bench_standin

            bench_standin.install(one_gpu=True)
        try:
            super().__init__(comm)
        except UsageError as error:
            raise SystemExit(NO_GPU.format(error=error, predicted=predicted())) from None

    def empty(self, count: int, dtype: str) -> Any:
        """Return a new uninitialised 1-D CuPy array."""
        return self.gpu.empty((count,), NUMPY[dtype])

    def put(self, array: Any, values: Array) -> None:
        """Write host values to an array, and wait until they are written."""
        self.write(array, [(len(values), values)])

    def seconds(self, call: Call, calls: int) -> tuple[float, float]:
        """Return the mean seconds of several calls: by the host's clock, and by CUDA events on the current stream."""
        self.finish()
        timer: GpuTimer = self.timer("")
        return timer.seconds(call, calls), timer.events[-1]


def copy_rate(machine: Machine, nbytes: int, calls: int) -> float:
    """Return the GB/s of a copy within the GPU's memory, counting bytes read and bytes written, by events."""
    source, target = machine.empty(nbytes, "uint8"), machine.empty(nbytes, "uint8")
    machine.copy(target, source)
    _, seconds = machine.seconds(lambda: machine.copy(target, source), calls)
    return 2 * nbytes / seconds / 1e9


def pinned_rate(machine: Machine, world: Any, nbytes: int, calls: int = 5) -> float:
    """Return the GB/s at which each rank copies to pinned memory and, on another stream, back, all at once. Collective.

    Both directions are counted; of the slowest rank.
    """
    copy = machine.staged_traffic(nbytes, nbytes)
    copy()
    machine.finish()
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        copy()
    machine.finish()
    seconds: float = max(world.allgather(time.perf_counter() - begin)) / calls
    return 2 * nbytes / seconds / 1e9


def one_way_rates(machine: Machine, nbytes: int, calls: int = 5) -> tuple[float, float]:
    """Return the GB/s of copies to the GPU from pinned memory, and to pinned memory, each alone."""
    there, here = machine.empty(nbytes, "uint8"), machine.gpu.staging(nbytes)
    rates = []
    for target, source in ((there, here), (here, there)):
        machine.copy(target, source)
        host, _ = machine.seconds(partial(machine.copy, target, source), calls)
        rates.append(nbytes / host / 1e9)
    return rates[0], rates[1]
