"""A stand-in for cupy.cuda.nccl: MPI moves the data when the stream reaches it.

Like NCCL, it combines in the dtype of the arrays and in an order of its own (that of ranks, reversed), waits for all
ranks when a communicator is created, and refuses ranks that share a GPU. All processes share one at first;
`share_gpus(False)` gives each one its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from commlib.dtypes import NUMPY, Array
from tests.cuda import standin
from tests.late.memory import Place

_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_OPERATIONS: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("SUM", np.add), ("PROD", np.multiply), ("MAX", np.maximum), ("MIN", np.minimum),
)  # fmt: skip

calls: list[str] = []
"""The collectives that were queued here."""

broken: set[int] = set()
"""Ranks that cannot join others."""

_own: list[bool] = []


def share_gpus(shared: bool) -> None:
    """Let the processes have one GPU, or each its own."""
    _own[:] = [not shared]


def bus_id(device: int) -> str:
    """Return the location of this process' GPU, as CUDA reports it."""
    return f"0000:{os.getpid() % 0x10000 if any(_own) else 0:04x}{device:02x}:00.0"


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        words = {2: "SYSTEM_ERROR: unhandled system error", 5: "INVALID_USAGE: invalid usage"}
        super().__init__(f"NCCL_ERROR_{words[status]}")


def get_unique_id() -> bytes:
    return os.urandom(16).hex().encode().ljust(128, b"\0")


class NcclCommunicator:
    """cupy.cuda.nccl.NcclCommunicator."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        from mpi4py import MPI  # starts it, and processes that only look at this module have none

        if rank in broken:
            raise NcclError(2)
        folder = Path(tempfile.gettempdir(), f"commlib-nccl-{commId[:32].decode()}")
        ranks = _exchange(folder, ndev, rank)
        if len({bus for _, bus in ranks}) < ndev and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise NcclError(5)
        members = MPI.COMM_WORLD.Get_group().Incl([int(world) for world, _ in ranks])
        self._mpi: Any = MPI.COMM_WORLD.Create_group(members, tag=77)
        self._rank, self._size = rank, ndev
        self._mpi.Barrier()
        if rank == 0:
            shutil.rmtree(folder)
        self._given_up = threading.Event()

    def destroy(self) -> None:
        mpi, self._mpi = self._mpi, None
        if mpi is not None:
            mpi.Free()

    def abort(self) -> None:
        self._given_up.set()
        self._mpi = None

    def check_async_error(self) -> None:
        pass

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        kind = _kind(datatype)
        self._queue("allReduce", (sendbuf, count), (recvbuf, count), kind, stream, lambda all: _combined(all, op))

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        part, kind = slice(self._rank * recvcount, (self._rank + 1) * recvcount), _kind(datatype)
        source = sendbuf, recvcount * self._size
        self._queue("reduceScatter", source, (recvbuf, recvcount), kind, stream, lambda all: _combined(all, op)[part])

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        target = recvbuf, count if self._rank == root else 0
        self._queue("reduce", (sendbuf, count), target, _kind(datatype), stream, lambda all: _combined(all, op))

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        target = recvbuf, count * self._size
        self._queue("allGather", (sendbuf, count), target, _kind(datatype), stream, np.concatenate)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        kind = _kind(datatype)
        self._queue("broadcast", (sendbuff, count), (recvbuff, count), kind, stream, lambda all: all[root])

    def _queue(
        self,
        name: str,
        source: tuple[int, int],
        target: tuple[int, int],
        kind: np.dtype[Any],
        stream: int,
        result: Callable[[list[Array]], Array],
    ) -> None:
        calls.append(name)
        mpi, late_stream = self._mpi, standin.Stream.known[stream]

        def run() -> None:
            own = _array(*source, kind).copy()  # it may be a part of the target
            everyone = np.empty((self._size, len(own)), kind)
            requests = [mpi.Irecv(row.view(np.uint8), peer) for peer, row in enumerate(everyone)]
            requests += [mpi.Isend(own.view(np.uint8), peer) for peer in range(self._size)]
            while not all(request.Test() for request in requests):
                if self._given_up.is_set():
                    for request in requests[: self._size]:
                        if request:
                            request.Cancel()
                            request.Wait()
                    _leftovers.append((requests, own))
                    return
                time.sleep(20e-6)
            _array(*target, kind)[:] = result(list(everyone))[: target[1]]

        places = [_place(*target, kind)] if target[1] else []
        standin.ENGINE.submit(late_stream, places, [_place(*source, kind)], run, whole=True)


_leftovers: list[Any] = []


def _exchange(folder: Path, size: int, rank: int) -> list[list[str]]:
    """Return each rank's description of itself: its rank among all processes, and its GPU."""
    from mpi4py import MPI

    folder.mkdir(exist_ok=True)
    unfinished = folder / f"{rank}.new"
    unfinished.write_text(f"{MPI.COMM_WORLD.rank} {bus_id(0)}")
    unfinished.rename(folder / str(rank))
    files, deadline = [folder / str(other) for other in range(size)], time.monotonic() + 20
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise NcclError(2)
        time.sleep(1e-3)
    return [file.read_text().split() for file in files]


def _kind(number: int) -> np.dtype[Any]:
    return NUMPY[_DTYPES[number]]


def _place(address: int, count: int, kind: np.dtype[Any]) -> Place:
    return address, count * kind.itemsize, standin.POISON


def _array(address: int, count: int, kind: np.dtype[Any]) -> Array:
    raw: Any = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(raw, np.uint8).view(kind)


def _combined(everyone: list[Array], op: int) -> Array:
    with np.errstate(all="ignore"):
        return reduce(_OPERATIONS[op][1], reversed(everyone))


def module(version: int = 23003) -> ModuleType:
    """Return the result of `import cupy.cuda.nccl`."""
    created = ModuleType("cupy.cuda.nccl")
    vars(created).update({f"NCCL_{name.upper()}": number for number, name in enumerate(_DTYPES)})
    vars(created).update({f"NCCL_{name}": number for number, (name, _) in enumerate(_OPERATIONS)})
    vars(created).update(
        available=True, get_version=lambda: version, get_unique_id=get_unique_id, NcclCommunicator=NcclCommunicator,
        NcclError=NcclError,
    )  # fmt: skip
    return created
