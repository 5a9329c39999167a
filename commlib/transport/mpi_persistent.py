"""Persistent MPI messages: MPI's persistent requests."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from commlib.dtypes import Array
from commlib.errors import TransportError
from commlib.process import forks
from commlib.transport.base import MessageFunctions, WaitHook
from commlib.transport.polling import EAGER, poll

# Cancelled requests whose memory MPI may still access, which must therefore stay alive.
_LEFT_BEHIND: list[Any] = []

_start_all, _test_all = MPI.Prequest.Startall, MPI.Request.Testall  # the lookup takes half as long as the call


@cache
def functions() -> MessageFunctions | None:
    """Return the functions that start and test MPI's requests; None if mpi4py's module hides the symbols."""
    try:
        library = ctypes.CDLL(MPI.__file__)  # finds the symbols of its MPI library too
        start, test = (ctypes.cast(library[name], ctypes.c_void_p).value for name in ("MPI_Startall", "MPI_Testall"))
    except (OSError, AttributeError):
        return None
    sizes = MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)
    return MessageFunctions(start or 0, test or 0, *sizes, _failure)


def _failure(code: int) -> TransportError:
    """Return the error for a return code of MPI."""
    return TransportError(f"MPI: {MPI.Exception(code)}")


class MpiRound:
    """Persistent requests, `receives` receives first, and their memory."""

    __slots__ = ("_memory", "_receives", "_requests", "handles")

    def __init__(self, requests: list[Any], receives: int, memory: Any) -> None:
        self._requests: list[Any] | None = requests
        self._receives, self._memory = receives, memory
        nbytes = MPI._sizeof(MPI.Request)
        handles = b"".join(ctypes.string_at(MPI._addressof(request), nbytes) for request in requests)
        self.handles: Array = np.array(bytearray(handles), np.uint8)

    def run(self, on_wait: WaitHook) -> None:
        requests = self._requests
        if requests is None:
            raise TransportError("MPI: these messages were abandoned in flight, and cannot be sent again")
        try:
            _start_all(requests)
            for _ in range(EAGER):
                if _test_all(requests):
                    return
            poll(lambda: _test_all(requests), on_wait)
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        requests, self._requests = self._requests, None
        if requests is None:
            return
        _LEFT_BEHIND.append((requests, self._memory))
        for request in requests[: self._receives]:
            if not request.Test():
                request.Cancel()
                request.Test()  # it ends at once, unless its message has begun to arrive

    def __del__(self) -> None:
        if not MPI.Is_finalized() and not forks.is_child():
            for request in self._requests or ():
                request.Free()


class MpiPersistentMessage:
    """One persistent request, and its memory."""

    __slots__ = ("_memory", "_receives", "_request")

    def __init__(self, request: Any, memory: memoryview, *, receives: bool) -> None:
        self._request: Any = request
        self._memory, self._receives = memory, receives

    @property
    def handle_at(self) -> int:
        return int(MPI._addressof(self._request))

    def start(self) -> None:
        try:
            self._request.Start()
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def test(self) -> bool:
        try:
            return self._request is None or bool(self._request.Test())
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def close(self) -> None:
        request, self._request = self._request, None
        if request is None or forks.is_child() or MPI.Is_finalized():
            return
        try:
            ended = request.Test()
            if not ended and self._receives:
                request.Cancel()
                ended = request.Test()
            if ended:
                request.Free()
                return
        except MPI.Exception:
            pass
        _LEFT_BEHIND.append((request, self._memory))  # a message is in flight

    def __del__(self) -> None:
        self.close()
