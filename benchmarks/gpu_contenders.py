"""Contenders of the GPU benchmark: commlib, torch's gloo, NCCL and MPI, each verb on the same GPU arrays."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.gpu_machine import Call, Machine
from commlib.transport import cuda_aware


class NoPeer(Exception):
    """A contender does not support this verb here."""


@dataclass(frozen=True, slots=True)
class VerbTask:
    """One verb on arrays of a rank. counts: elements from each rank to each, for exchanges; `out` may be `x`."""

    verb: str
    dtype: str
    x: Any
    out: Any
    counts: Sequence[Sequence[int]] = ()

    def splits(self, rank: int) -> list[int]:
        """Return the number of elements that a rank sends to each rank."""
        return list(self.counts[rank])

    def takes(self, rank: int) -> list[int]:
        """Return the number of elements that a rank receives from each rank."""
        return [row[rank] for row in self.counts]


def ours(comm: Any, task: VerbTask) -> Call:
    """Return a function that runs commlib's verb once."""
    x, out, verb = task.x, task.out, getattr(comm, task.verb)
    if task.verb == "all_to_all_v":
        splits, takes = task.splits(comm.rank), task.takes(comm.rank)
        return lambda: verb(x, splits, takes=takes, out=out)
    return lambda: verb(x, out=out)


class GlooPeer:
    """torch.distributed on gloo, which must be initialised."""

    def __init__(self, machine: Machine, world: Any) -> None:
        self._machine, self._rank, self.finish = machine, world.rank, machine.finish_torch

    def call(self, task: VerbTask) -> Call:
        import torch.distributed as dist

        x, out = (self._machine.as_torch(array, task.dtype) for array in (task.x, task.out))
        if task.verb == "all_reduce":
            return lambda: dist.all_reduce(x)
        if task.verb == "all_gather":
            gather = _newest("all_gather_single", "all_gather_into_tensor")
            return lambda: gather(out, x)
        if task.verb == "reduce_scatter":
            scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(out, x)
        takes, splits = task.takes(self._rank), task.splits(self._rank)
        return lambda: dist.all_to_all_single(out, x, takes, splits)


def _newest(*names: str) -> Any:
    """Return the first of these functions that this torch has: calls of the older ones print warnings."""
    import torch.distributed as dist

    return next(getattr(dist, name) for name in names if hasattr(dist, name))


class NcclPeer:
    """NCCL through CuPy; ranks may share a GPU if this NCCL supports it."""

    def __init__(self, machine: Machine, world: Any) -> None:
        self._machine, self._world, self.finish = machine, world, machine.finish

    @cached_property
    def _nccl(self) -> Any:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        if self._machine.is_real:
            import torch  # noqa: F401  # loads an NCCL library into the process
        from cupy.cuda import nccl

        if not nccl.available:
            raise NoPeer("CuPy finds no NCCL library")
        return nccl

    @cached_property
    def _comm(self) -> Any:
        number = self._world.bcast(self._nccl.get_unique_id() if self._world.rank == 0 else None)
        return self._nccl.NcclCommunicator(self._world.size, number, self._world.rank)

    def call(self, task: VerbTask) -> Call:
        nccl, comm, stream = self._nccl, self._comm, self._machine.device.current().raw.ptr
        kind = {"float32": nccl.NCCL_FLOAT32, "bfloat16": nccl.NCCL_BFLOAT16}[task.dtype]
        x, out = self._machine.address(task.x), self._machine.address(task.out)
        if task.verb == "all_reduce":
            return lambda: comm.allReduce(x, out, task.x.size, kind, nccl.NCCL_SUM, stream)
        if task.verb == "reduce_scatter":
            return lambda: comm.reduceScatter(x, out, task.out.size, kind, nccl.NCCL_SUM, stream)
        if task.verb == "all_gather":
            return lambda: comm.allGather(x, out, task.x.size, kind, stream)
        rank, item = self._world.rank, task.x.dtype.itemsize
        sends = _parts(x, task.splits(rank), item)
        receives = _parts(out, task.takes(rank), item)

        def exchange() -> None:
            nccl.groupStart()
            for peer, (address, count) in enumerate(sends):
                comm.send(address, count, kind, peer, stream)
            for peer, (address, count) in enumerate(receives):
                comm.recv(address, count, kind, peer, stream)
            nccl.groupEnd()

        return exchange


def _parts(address: int, counts: Sequence[int], item: int) -> list[tuple[int, int]]:
    """Return the address and length of each of several consecutive parts."""
    return [(address + item * start, count) for start, count in zip(_starts(counts), counts, strict=True)]


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts[:-1])]


class MpiPeer:
    """MPI's own collectives on device pointers, if the library says that it supports them."""

    def __init__(self, machine: Machine, world: Any) -> None:
        self._machine, self._world = machine, world
        self.finish = machine.finish

    def call(self, task: VerbTask) -> Call:
        from mpi4py import MPI

        if self._machine.is_real and not is_cuda_aware():
            raise NoPeer("this MPI is not CUDA-aware")
        if task.dtype != "float32":
            raise NoPeer(f"MPI cannot reduce {task.dtype}")
        world = self._world
        x, out = (MPI.memory.fromaddress(self._machine.address(array), array.nbytes) for array in (task.x, task.out))
        wait, rank = self._machine.finish, world.rank  # MPI has no streams

        def behind(call: Call) -> Call:
            def run() -> None:
                wait()
                call()

            return run

        if task.verb == "all_reduce":
            return behind(lambda: world.Allreduce(MPI.IN_PLACE, [out, MPI.FLOAT]))
        if task.verb == "reduce_scatter":
            return behind(lambda: world.Reduce_scatter_block([x, MPI.FLOAT], [out, MPI.FLOAT]))
        if task.verb == "all_gather":
            return behind(lambda: world.Allgather([x, MPI.FLOAT], [out, MPI.FLOAT]))
        splits, takes = task.splits(rank), task.takes(rank)
        sending, taking = [x, (splits, _starts(splits)), MPI.FLOAT], [out, (takes, _starts(takes)), MPI.FLOAT]
        return behind(lambda: world.Alltoallv(sending, taking))


def is_cuda_aware() -> bool:
    """Return whether the MPI library of this process says that it is CUDA-aware."""
    from mpi4py import MPI

    return bool(cuda_aware.ask_loaded(MPI).says)


PEERS: dict[str, Callable[[Machine, Any], Any]] = {"gloo": GlooPeer, "nccl": NcclPeer, "mpi": MpiPeer}
