"""GpuMemory: arrays of a benchmark on the GPU of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.bench import gloo_peer
from commlib.bench.measure import Call
from commlib.bench.memory import HOST, Blocks
from commlib.devices.cuda import process
from commlib.devices.cuda.device import CudaDevice
from commlib.devices.selection import select_device
from commlib.dtypes import NUMPY, Array


class GpuTimer:
    """The clocks of one contender: the host's, and CUDA events on the current stream.

    finish: waits for queued work. events: the mean seconds of a call by events, of each burst; a contender that queues
    its work on streams of its own has none.
    """

    def __init__(self, memory: GpuMemory, finish: Callable[[], None], *, has_events: bool) -> None:
        self._memory, self.finish, self._has_events = memory, finish, has_events
        self.events: list[float] = []

    def seconds(self, call: Call, calls: int) -> float:
        cuda, stream = self._memory.cuda, self._memory.stream()
        first, last = cuda.Event(), cuda.Event()
        start = time.perf_counter()
        first.record(stream)
        for _ in range(calls):
            call()
        last.record(stream)
        last.synchronize()
        self.finish()
        seconds = (time.perf_counter() - start) / calls
        if self._has_events:
            self.events.append(cuda.get_elapsed_time(first, last) * 1e-3 / calls)
        return seconds


class GpuMemory:
    """Arrays of CuPy, and work queued on its current stream. See `commlib.bench.memory.BenchMemory`."""

    device = "cuda"
    bound_from = 1 << 20

    def __init__(self, comm: Any) -> None:
        """Collective. Raises UsageError on all ranks if a rank has no GPU; the text names it."""
        nodes, rank = comm.topology.nodes, comm.rank
        place = nodes[comm.topology.node(rank)].index(rank)
        self.gpu: CudaDevice = select_device("cuda", "bench", place, comm.all_gather_object)
        cupy, _ = process.library()
        self.cuda: Any = cupy.cuda
        self._version: str = getattr(cupy, "__version__", "")
        # Whether settings make the ranks of a node exchange GPU arrays through host memory.
        self._is_staged = not (comm.config.device_ipc and comm.config.device_peers)

    def stream(self) -> Any:
        """Return CuPy's current stream."""
        return self.gpu.current().raw

    def allocate(self, comm: Any, count: int, dtype: str, *, symmetric: bool) -> Any:
        return comm.empty(count, dtype, self.gpu) if symmetric else self.gpu.empty((count,), NUMPY[dtype])

    def part(self, array: Any, start: int, count: int) -> Any:
        return self.gpu.at(array.data.ptr + start * array.dtype.itemsize, (count,), array.dtype, array)

    def write(self, array: Any, blocks: Blocks) -> None:
        block = self.gpu.staging(array.nbytes)
        HOST.write(block.view(array.dtype), blocks)
        self.copy(array, block)
        self.finish()

    def read(self, array: Any) -> Array:
        block = self.gpu.staging(array.nbytes)
        self.copy(block, array)
        self.finish()
        return block.view(array.dtype)

    def clear(self, array: Any) -> None:
        self.gpu.kernels.fill(self.gpu.wrap(array, "bench"), 0)

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between arrays and memory of `gpu.staging`."""
        self.gpu.copy(*(x if isinstance(x, np.ndarray) else self.gpu.wrap(x, "bench") for x in (target, source)))

    def finish(self) -> None:
        self.stream().synchronize()

    def timer(self, contender: str) -> GpuTimer:
        if contender == "gloo":  # PyTorch has streams of its own for it
            return GpuTimer(self, gloo_peer.finish_on_gpu, has_events=False)
        return GpuTimer(self, self.finish, has_events=True)

    def has_bound(self, comm: Any, world: Any) -> bool:
        """Return whether the ranks share one GPU, whose memory is the bound, or pass data through the host.

        Between several GPUs links are the limit, and not known.
        """
        shares = len(set(world.allgather(self.bus_id()))) == 1
        return bool(comm.one_node and comm.size > 1 and (shares or self._is_staged))

    def traffic(self, read: int, written: int, replaces: bool) -> Call:
        """Return a call that copies within the GPU, reading and writing `read` + `written` bytes in all.

        If data passes through the host: `staged_traffic`.
        """
        if self._is_staged:
            return self.staged_traffic(read, written)
        half = (read + written) // 2
        target, source = (self.gpu.empty((half,), np.uint8) for _ in range(2))
        return lambda: self.copy(target, source)

    def staged_traffic(self, read: int, written: int) -> Call:
        """Return a call that copies `read` bytes to the host and `written` bytes from it, at once, on two streams."""
        sizes = read, written
        here = [self.gpu.staging(nbytes) for nbytes in sizes]
        there = [self.gpu.empty((nbytes,), np.uint8) for nbytes in sizes]
        streams = [self.gpu.stream() for _ in sizes]
        pairs = [(here[0], there[0]), (there[1], here[1])]

        def run() -> None:
            before, current = self.gpu.current().record(), self.gpu.current()
            for stream, (target, source) in zip(streams, pairs, strict=True):
                stream.wait(before)
                with self.gpu.using(stream):
                    self.copy(target, source)
                current.wait(stream.record())

        return run

    def bus_id(self) -> str:
        """Return an identifier of the GPU that is unique on the host."""
        return str(self.cuda.runtime.deviceGetPCIBusId(self.gpu.index))

    def facts(self) -> dict[str, Any]:
        """Return facts about the GPU and its software, for a record."""
        runtime, index = self.cuda.runtime, self.gpu.index
        properties = runtime.getDeviceProperties(index)
        facts = {
            "name": properties["name"].decode(),
            "bytes": int(properties["totalGlobalMem"]),
            "gpus": int(runtime.getDeviceCount()),
            "driver": int(runtime.driverGetVersion()),
            "runtime": int(runtime.runtimeGetVersion()),
            "cupy": self._version,
        }
        return {"gpu": facts}
