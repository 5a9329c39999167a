"""Messages over MPI that are sent and received again and again: its persistent requests."""

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

# What was given up while MPI may still read or write its memory, which must stay.
_LEFT_BEHIND: list[Any] = []

_start_all, _test_all = MPI.Prequest.Startall, MPI.Request.Testall  # to look them up takes half as long as to call them


@cache
def functions() -> MessageFunctions | None:
    """Return what starts and tests this MPI's requests; None if mpi4py is linked in a way that hides it."""
    try:
        library = ctypes.CDLL(MPI.__file__)  # finds what the module is linked with, too
        start, test = (ctypes.cast(library[name], ctypes.c_void_p).value for name in ("MPI_Startall", "MPI_Testall"))
    except (OSError, AttributeError):
        return None
    sizes = MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)
    return MessageFunctions(start or 0, test or 0, *sizes, _failure)


def _failure(code: int) -> TransportError:
    """Return the error for what one of MPI's functions has returned."""
    return TransportError(f"MPI: {MPI.Exception(code)}")


class MpiRound:
    """Hold persistent requests, `receives` receives first, and the memory that they are for."""

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
            raise TransportError("MPI: these messages were given up on their way, and cannot be sent again")
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
                request.Test()  # it ends at once, unless its message has begun to come

    def __del__(self) -> None:
        if not MPI.Is_finalized() and not forks.is_child():
            for request in self._requests or ():
                request.Free()


class MpiPersistent:
    """One persistent request, and the memory that it is for."""

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
        _LEFT_BEHIND.append((request, self._memory))  # a message is on its way

    def __del__(self) -> None:
        self.close()
