"""GpuPeerMemory: memory on the GPUs of a node's ranks that all of them can address, through CUDA IPC handles.

A process must not free its memory while another process has it open. So each rank sets a flag in shared host memory
when it has closed the others' memory. Memory that a process still has open is kept until that process closes it or
ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commlib.buffers import shared_memory
from commlib.devices.protocol import UnreachableMemoryError
from commlib.errors import TransportError
from commlib.protocols import SharedMemory

Gather = Callable[[Any], list[Any]]

_PAGE = 4096


@dataclass(slots=True)
class _PeerMapping:
    """One rank's part of a PeerMemory. closed: pages where each rank sets a flag after closing the others' memory."""

    cuda: Any
    gpu: int
    own: int
    others: list[int]
    closed: SharedMemory
    rank: int
    processes: list[int]  # process ids of all ranks; 0 if the id has no meaning here

    def close(self) -> None:
        """Close the memory of the other ranks."""
        with self.cuda.Device(self.gpu):
            for address in self.others:
                self.cuda.runtime.ipcCloseMemHandle(address)
        ctypes.c_int64.from_address(self.closed.bases[self.rank]).value = 1

    def free(self) -> bool:
        """Free this rank's memory if all other ranks have closed it; return whether they have."""
        for base, process in zip(self.closed.bases, self.processes, strict=True):
            if not ctypes.c_int64.from_address(base).value and not _is_gone(process):
                return False
        with self.cuda.Device(self.gpu):
            self.cuda.runtime.free(self.own)
        self.closed.close()
        return True


def _is_gone(process: int) -> bool:
    if not process:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


# Released here, but perhaps still open in another process. A finalizer may run in any thread and inside another.
_lingering: list[_PeerMapping] = []
_lock = threading.RLock()


def sweep() -> None:
    """Free the memory that no process has open any more."""
    with _lock:
        given_up, _lingering[:] = _lingering[:], []
    left = [opened for opened in given_up if not opened.free()]
    with _lock:
        _lingering.extend(left)


class GpuPeerMemory:
    """`nbytes` of zeroed memory on each rank's GPU, as a `protocols.SharedMemory`."""

    def __init__(self, bases: list[int], nbytes: int, opened: _PeerMapping) -> None:
        self.bases, self.nbytes = bases, nbytes
        # Arrays may outlive the group. At process exit the driver frees all memory, perhaps before a finalizer runs.
        self._end = weakref.finalize(self, _give_up, opened)
        self._end.atexit = False

    def close(self) -> None:
        """Close the other ranks' memory, and free this rank's as soon as they have closed it."""
        self._end()


def _give_up(opened: _PeerMapping) -> None:
    opened.close()
    with _lock:
        _lingering.append(opened)
    sweep()


def share(cuda: Any, gpu: int, nbytes: int, rank: int, gather: Gather) -> GpuPeerMemory:
    """Return memory on all ranks' GPUs. Collective; `gather` all-gathers values.

    Raises TransportError on all ranks if one of them cannot allocate its memory or open another's.
    """
    sweep()
    runtime = cuda.runtime

    def everywhere(what: str, step: Callable[[], Any], kind: type[TransportError]) -> list[Any]:
        answer, error = None, ""
        try:
            with cuda.Device(gpu):
                answer = step()
        except runtime.CUDARuntimeError as caught:
            error = f"rank {rank} of the node, GPU {gpu}: {caught}"
        answers = gather((answer, error))
        if errors := [error for _, error in answers if error]:
            raise kind(
                f"cannot {what} {nbytes} bytes on the GPUs of {len(answers)} ranks ({'; '.join(errors)}): is there "
                "enough memory, are all GPUs of the node visible to all of its ranks (CUDA_VISIBLE_DEVICES, in "
                "containers --ipc=host), and do they support peer access (nvidia-smi topo -p2p r)?"
            )
        return [answer for answer, _ in answers]

    def make() -> tuple[int, tuple[int, str]]:
        allocations.append(address := runtime.malloc(max(nbytes, 1)))
        runtime.memset(address, 0, max(nbytes, 1))
        cuda.Stream.null.synchronize()  # other ranks will read it on their own streams
        return address, _identity()

    def open_all() -> None:
        for place, ((address, process), handle) in enumerate(zip(parts, handles, strict=True)):
            if place == rank or process == _identity():  # ranks may be threads; no process opens its own handle
                bases.append(address)
            else:
                bases.append(runtime.ipcOpenMemHandle(handle))
                opened.append(bases[-1])

    allocations: list[int] = []
    bases: list[int] = []
    opened: list[int] = []
    closed = shared_memory.share(rank, _PAGE, gather)
    try:
        parts = everywhere("make", make, TransportError)
        handles = everywhere("export", lambda: runtime.ipcGetMemHandle(allocations[0]), UnreachableMemoryError)
        everywhere("open", open_all, UnreachableMemoryError)
    except TransportError:
        with cuda.Device(gpu):
            for address in opened:
                runtime.ipcCloseMemHandle(address)
            gather(None)  # wait until all ranks have closed the others' memory
            for address in allocations:
                runtime.free(address)
        closed.close()
        raise
    processes = [0 if closed.is_named else process for _, (process, _) in parts]
    return GpuPeerMemory(bases, nbytes, _PeerMapping(cuda, gpu, allocations[0], opened, closed, rank, processes))


def _identity() -> tuple[int, str]:
    """Return an identity that is unique among all processes of this host, even across containers."""
    return os.getpid(), os.readlink("/proc/self/ns/pid")


class CudaExportedMemory:
    """GPU memory as `devices.protocol.CudaExportedMemory`."""

    def __init__(self, cuda: Any, gpu: int, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            with cuda.Device(gpu):
                self.address: int = cuda.runtime.malloc(max(nbytes, 1))
                self._end = weakref.finalize(self, _free, cuda, gpu, self.address)
                self._end.atexit = False  # at process exit the driver frees all memory
                handle: bytes = cuda.runtime.ipcGetMemHandle(self.address)
        except cuda.runtime.CUDARuntimeError as error:
            raise TransportError(f"cannot make {nbytes} bytes on GPU {gpu} for another process: {error}") from error
        self.handle = json.dumps([*_identity(), self.address, handle.hex()])

    def free(self) -> None:
        self._end()


def _free(cuda: Any, gpu: int, address: int) -> None:
    with cuda.Device(gpu):
        cuda.runtime.free(address)


class CudaOpenedMemory:
    """A mapping of another process's GPU memory, as `devices.protocol.CudaOpenedMemory`."""

    def __init__(self, cuda: Any, gpu: int, handle: str) -> None:
        process, space, address, raw = json.loads(handle)
        self.address: int = address
        self._end: Any = None
        if (process, space) == _identity():  # ranks may be threads; no process opens its own handle
            return
        try:
            with cuda.Device(gpu):
                self.address = cuda.runtime.ipcOpenMemHandle(bytes.fromhex(raw))
        except cuda.runtime.CUDARuntimeError as error:
            raise TransportError(
                f"cannot open memory of process {process} on GPU {gpu}: {error}: are all GPUs of the node visible to "
                "all of its ranks, and do they support peer access (nvidia-smi topo -p2p r)?"
            ) from error
        self._end = weakref.finalize(self, _close, cuda, gpu, self.address)
        self._end.atexit = False

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _close(cuda: Any, gpu: int, address: int) -> None:
    with cuda.Device(gpu):
        cuda.runtime.ipcCloseMemHandle(address)
