"""PeerMemory: memory of the GPUs of a node's ranks that each of them can address, through CUDA's IPC handles.

Whoever made memory may not free it while another process has it open, so each rank says when it has closed what it had
opened, in a page of host memory that all see; what somebody still has open stays until that one has closed it, or is
gone.
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
from commlib.devices.protocol import OutOfReachError
from commlib.errors import TransportError
from commlib.protocols import SharedMemory

Gather = Callable[[Any], list[Any]]

_PAGE = 4096


@dataclass(slots=True)
class _Opened:
    """What one rank has of a shared memory. closed: pages in which ranks say that they closed what they had opened."""

    cuda: Any
    gpu: int
    own: int
    others: list[int]
    closed: SharedMemory
    rank: int
    processes: list[int]  # of all ranks; 0 where that says nothing here

    def close(self) -> None:
        """Close what was opened of others."""
        with self.cuda.Device(self.gpu):
            for address in self.others:
                self.cuda.runtime.ipcCloseMemHandle(address)
        ctypes.c_int64.from_address(self.closed.bases[self.rank]).value = 1

    def free(self) -> bool:
        """Free what was made here, if all others have closed it; return whether they have."""
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


# What was given up here, and somebody else may still have open. A finalizer may run in any thread, and within another.
_lingering: list[_Opened] = []
_lock = threading.RLock()


def sweep() -> None:
    """Free what nobody has open any more."""
    with _lock:
        given_up, _lingering[:] = _lingering[:], []
    left = [opened for opened in given_up if not opened.free()]
    with _lock:
        _lingering.extend(left)


class PeerMemory:
    """See `protocols.SharedMemory`: `nbytes` of zeroed memory of each rank's GPU."""

    def __init__(self, bases: list[int], nbytes: int, opened: _Opened) -> None:
        self.bases, self.nbytes = bases, nbytes
        # Arrays may outlive the group. At the process' end the driver frees all, and may be gone before this.
        self._end = weakref.finalize(self, _give_up, opened)
        self._end.atexit = False

    def close(self) -> None:
        """Close what was opened of others, and free what was made here as soon as they have done so, too."""
        self._end()


def _give_up(opened: _Opened) -> None:
    opened.close()
    with _lock:
        _lingering.append(opened)
    sweep()


def share(cuda: Any, gpu: int, nbytes: int, rank: int, gather: Gather) -> PeerMemory:
    """Return memory of all ranks' GPUs. Collective; `gather` tells every rank's value to all.

    Raises TransportError on all ranks if one of them cannot have its part, or cannot open another's.
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
                f"cannot {what} {nbytes} bytes on the GPUs of {len(answers)} ranks ({'; '.join(errors)}): is there so "
                "much, are all GPUs of the node visible to all of its ranks (CUDA_VISIBLE_DEVICES, containers: "
                "--ipc=host), and can they reach each other (nvidia-smi topo -p2p r)?"
            )
        return [answer for answer, _ in answers]

    def make() -> tuple[int, tuple[int, str]]:
        made.append(address := runtime.malloc(max(nbytes, 1)))
        runtime.memset(address, 0, max(nbytes, 1))
        cuda.Stream.null.synchronize()  # others will read it on streams of theirs
        return address, _identity()

    def open_all() -> None:
        for place, ((address, process), handle) in enumerate(zip(parts, handles, strict=True)):
            if place == rank or process == _identity():  # ranks may be threads, and a process cannot open its own
                bases.append(address)
            else:
                bases.append(runtime.ipcOpenMemHandle(handle))
                opened.append(bases[-1])

    made: list[int] = []
    bases: list[int] = []
    opened: list[int] = []
    closed = shared_memory.share(rank, _PAGE, gather)
    try:
        parts = everywhere("make", make, TransportError)
        handles = everywhere("export", lambda: runtime.ipcGetMemHandle(made[0]), OutOfReachError)
        everywhere("open", open_all, OutOfReachError)
    except TransportError:
        with cuda.Device(gpu):
            for address in opened:
                runtime.ipcCloseMemHandle(address)
            gather(None)  # all have closed what they had opened
            for address in made:
                runtime.free(address)
        closed.close()
        raise
    processes = [0 if closed.is_named else process for _, (process, _) in parts]
    return PeerMemory(bases, nbytes, _Opened(cuda, gpu, made[0], opened, closed, rank, processes))


def _identity() -> tuple[int, str]:
    """Return what distinguishes this process from all others of this host, in whatever containers they are."""
    return os.getpid(), os.readlink("/proc/self/ns/pid")


class Exported:
    """See `devices.protocol.Exported`."""

    def __init__(self, cuda: Any, gpu: int, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            with cuda.Device(gpu):
                self.address: int = cuda.runtime.malloc(max(nbytes, 1))
                self._end = weakref.finalize(self, _free, cuda, gpu, self.address)
                self._end.atexit = False  # at the process' end the driver frees all
                handle: bytes = cuda.runtime.ipcGetMemHandle(self.address)
        except cuda.runtime.CUDARuntimeError as error:
            raise TransportError(f"cannot make {nbytes} bytes on GPU {gpu} for another process: {error}") from error
        self.handle = json.dumps([*_identity(), self.address, handle.hex()])

    def free(self) -> None:
        self._end()


def _free(cuda: Any, gpu: int, address: int) -> None:
    with cuda.Device(gpu):
        cuda.runtime.free(address)


class Opened:
    """See `devices.protocol.Opened`."""

    def __init__(self, cuda: Any, gpu: int, handle: str) -> None:
        process, space, address, raw = json.loads(handle)
        self.address: int = address
        self._end: Any = None
        if (process, space) == _identity():  # ranks may be threads, and a process cannot open its own
            return
        try:
            with cuda.Device(gpu):
                self.address = cuda.runtime.ipcOpenMemHandle(bytes.fromhex(raw))
        except cuda.runtime.CUDARuntimeError as error:
            raise TransportError(
                f"cannot open memory of process {process} on GPU {gpu}: {error}: are all GPUs of the node visible to "
                "all of its ranks, and can they reach each other (nvidia-smi topo -p2p r)?"
            ) from error
        self._end = weakref.finalize(self, _close, cuda, gpu, self.address)
        self._end.atexit = False

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _close(cuda: Any, gpu: int, address: int) -> None:
    with cuda.Device(gpu):
        cuda.runtime.ipcCloseMemHandle(address)
