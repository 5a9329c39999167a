"""Machine: the GPU of this process for the GPU benchmarks, or for a dry run the tests' emulated GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from commlib.cost.gpus import H100, all_reduce_seconds
from commlib.dtypes import NUMPY, Array

Call = Callable[[], Any]

NO_GPU = (
    "this process finds no usable GPU ({error}); --tiny runs everything on an emulated GPU in host memory, whose "
    "figures mean nothing. PREDICTED, not measured, for all_reduce on one H100 shared by the ranks:\n{predicted}"
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


class GpuBytes:
    """GPU memory in the form that other libraries accept."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class Machine:
    """A GPU or its emulation. is_real: whether it is a GPU. device: commlib's. cupy: the library or its emulation."""

    def __init__(self, *, tiny: bool) -> None:
        """tiny: emulate a GPU. Without tiny, ends the program if there is no GPU."""
        if tiny:
            from benchmarks import gpu_dry

            gpu_dry.install()
        from commlib.devices.cuda import process
        from commlib.errors import UsageError

        try:
            self.device = process.device()
        except UsageError as error:
            raise SystemExit(NO_GPU.format(error=error, predicted=predicted())) from None
        import cupy

        self.cupy, self.is_real = cupy, not tiny

    def empty(self, count: int, dtype: str) -> Any:
        """Return a new uninitialised 1-D CuPy array."""
        return self.device.empty((count,), NUMPY[dtype])

    def view(self, memory: Any, count: int, dtype: str) -> Any:
        """Return the beginning of an array's memory as an array of another dtype."""
        return self.device.at(self.address(memory), (count,), NUMPY[dtype], memory)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def put(self, array: Any, values: Array) -> None:
        """Write host values to an array, and wait until they are written."""
        block = self.device.staging(values.nbytes)
        block[:] = values.reshape(-1).view(np.uint8)
        self.copy(array, block)
        self.finish()

    def fetch(self, array: Any, into: Array | None = None) -> Array:
        """Return the values of an array, after all work on this thread's stream. into: existing pinned memory."""
        block = self.device.staging(array.nbytes) if into is None else into[: array.nbytes]
        self.copy(block, array)
        self.finish()
        return block.view(array.dtype)

    def copy(self, target: Any, source: Any) -> None:
        """Queue a copy between arrays and pinned memory."""
        self.device.copy(self._there(target), self._there(source))

    def _there(self, array: Any) -> Any:
        return array if isinstance(array, np.ndarray) else self.device.wrap(array, "benchmark").reshape(-1)

    def as_torch(self, array: Any, dtype: str) -> Any:
        """Return a tensor over an array's memory; in a dry run a host tensor."""
        import ctypes

        import torch

        address, nbytes = self.address(array), array.nbytes
        if self.is_real:
            flat = torch.as_tensor(GpuBytes(address, nbytes), device=torch.device("cuda", self.device.index))
        else:
            flat = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        return flat.view(getattr(torch, dtype))

    def finish(self) -> None:
        """Wait for this thread's current stream."""
        self.device.current().raw.synchronize()

    def finish_torch(self) -> None:
        """Wait for all work that PyTorch has queued."""
        if self.is_real:
            import torch

            torch.cuda.synchronize()

    def seconds(self, call: Call, calls: int, finish: Call | None = None) -> tuple[float, float]:
        """Return the mean seconds of several calls: by the host's clock, and by CUDA events.

        finish: waits for the queued work of the calls; by default it waits for this thread's current stream.
        """
        cuda = self.cupy.cuda
        first, last, stream = cuda.Event(), cuda.Event(), self.device.current().raw
        self.finish()
        begin = time.perf_counter()
        first.record(stream)
        for _ in range(calls):
            call()
        last.record(stream)
        last.synchronize()
        if finish is not None:
            finish()
        host = time.perf_counter() - begin
        return host / calls, cuda.get_elapsed_time(first, last) * 1e-3 / calls

    def facts(self) -> dict[str, Any]:
        """Return facts about the GPU and its software, for a record."""
        runtime, index = self.cupy.cuda.runtime, self.device.index
        properties = runtime.getDeviceProperties(index)
        return {
            "name": properties["name"].decode(),
            "bytes": int(properties["totalGlobalMem"]),
            "gpus": int(runtime.getDeviceCount()),
            "driver": int(runtime.driverGetVersion()),
            "runtime": int(runtime.runtimeGetVersion()),
            "cupy": getattr(self.cupy, "__version__", ""),
            "is_real": self.is_real,
        }

    def where(self) -> str:
        """Return an identifier of the GPU that is unique on the host."""
        return str(self.cupy.cuda.runtime.deviceGetPCIBusId(self.device.index))


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
    there, back = machine.empty(nbytes, "uint8"), machine.empty(nbytes, "uint8")
    out, home = machine.device.staging(nbytes), machine.device.staging(nbytes)
    streams = machine.device.stream(), machine.device.stream()
    machine.finish()

    def copy() -> None:
        for stream, target, source in zip(streams, (out, back), (there, home), strict=True):
            with machine.device.using(stream):
                machine.copy(target, source)

    def wait() -> None:
        for stream in streams:
            stream.raw.synchronize()

    copy()
    wait()
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        copy()
    wait()
    seconds: float = max(world.allgather(time.perf_counter() - begin)) / calls
    return 2 * nbytes / seconds / 1e9


def one_way_rates(machine: Machine, nbytes: int, calls: int = 5) -> tuple[float, float]:
    """Return the GB/s of copies to the GPU from pinned memory, and to pinned memory, each alone."""
    there, here = machine.empty(nbytes, "uint8"), machine.device.staging(nbytes)
    rates = []
    for target, source in ((there, here), (here, there)):
        machine.copy(target, source)
        host, _ = machine.seconds(partial(machine.copy, target, source), calls)
        rates.append(nbytes / host / 1e9)
    return rates[0], rates[1]
