"""send, recv and send_recv: messages between two ranks, outside the order of the collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import as_host, contiguous, writable
from commlib.dtypes import Array
from commlib.errors import MismatchError, ShutdownError, StallError, TransportError, UsageError
from commlib.transport.base import Request
from commlib.work import Work

if TYPE_CHECKING:
    from commlib.communicator import Communicator

_MOST_TAGS = 32767  # what every MPI allows


class _OutOfTime(Exception):
    """A wait's own time is up; the message is still under way."""


class Messages(Work):
    """Some posted sends and receives. They move when somebody waits, and when the progress thread looks at them."""

    __slots__ = ("_collect", "_comm", "_lock", "_requests")

    def __init__(
        self, comm: Communicator, text: str, requests: list[Request], collect: Callable[[], Any], *keep: Any
    ) -> None:
        super().__init__(text)
        self._comm, self._requests = comm, requests
        self._collect: Any = (collect, keep)
        self._lock = threading.Lock()  # MPI allows one thread at a time to ask for a request

    def done(self) -> bool:
        """Make progress, and return whether all of them have arrived. Never blocks."""
        if not super().done() and self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()
        return super().done()

    def _advance(self) -> None:
        if super().done():
            return
        try:
            if all(request.test() for request in self._requests):
                self.finish(self._collect[0]())
                self._collect = None
        except (TransportError, MismatchError) as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for request in self._requests:
            request.cancel()
        self._collect = None
        self.finish(error=error)

    def wait(self, timeout: float | None = None) -> Any:
        """Block until all have arrived, at most `timeout` seconds; see `Work.wait`."""
        watch = self._comm.watch(self.description)
        if not super().done():
            with self._lock:
                self._wait_for_requests(watch, timeout)
        return super().wait(0)

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None; waits until they have arrived."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def _wait_for_requests(self, watch: Callable[[], None], timeout: float | None) -> None:
        import time

        deadline = None if timeout is None else time.monotonic() + timeout

        def idle() -> None:
            watch()
            if deadline is not None and time.monotonic() > deadline:
                raise _OutOfTime

        assert self._comm.mail is not None
        try:
            if not super().done():
                self._comm.mail.wait(self._requests, idle)
                self._advance()
        except _OutOfTime:
            raise StallError(f"{self.description}: not done after {timeout} s; it goes on, wait again") from None
        except Exception as error:
            self._fail(error)


def _check(comm: Communicator, verb: str, peer: int, tag: int) -> None:
    if not 0 <= peer < comm.size:
        raise UsageError(f"{verb}: peer is {peer}, but {comm.name} has the ranks 0 to {comm.size - 1}")
    if not 0 <= tag <= _MOST_TAGS:
        raise UsageError(f"{verb}: tag is {tag}, expected 0 to {_MOST_TAGS}")


def _post_send(comm: Communicator, verb: str, x: Any, peer: int, tag: int) -> tuple[Request, Array]:
    flat = contiguous(as_host(x, verb), verb).reshape(-1)
    _check(comm, verb, peer, tag)
    assert comm.mail is not None
    return comm.mail.send(peer, tag, flat.view(np.uint8).data), flat


def _post_recv(comm: Communicator, verb: str, x: Any, peer: int, tag: int) -> tuple[Request, Callable[[], Any]]:
    array = writable(as_host(x, verb), verb, "x")
    _check(comm, verb, peer, tag)
    flat = contiguous(array, verb).reshape(-1)
    assert comm.mail is not None
    request = comm.mail.recv(peer, tag, flat.view(np.uint8).data)

    def collect() -> Any:
        if request.nbytes != flat.nbytes:
            raise MismatchError(
                f"{comm.name}: {verb} from rank {peer}, tag {tag}, on rank {comm.rank}: expected {flat.nbytes} bytes, "
                f"got {request.nbytes}: send and receive the same count and dtype"
            )
        if not np.may_share_memory(flat, array):
            array[...] = flat.reshape(array.shape)
        return x

    return request, collect


def _work(comm: Communicator, text: str, requests: list[Request], collect: Callable[[], Any], *keep: Any) -> Messages:
    if comm.runtime.closing:
        raise ShutdownError(f"{text}: commlib has been shut down")
    return Messages(comm, text, requests, collect, *keep)


def send(comm: Communicator, x: Any, peer: int, tag: int) -> Messages:
    request, flat = _post_send(comm, "send", x, peer, tag)
    return _work(comm, f"send to rank {peer}, tag {tag}", [request], lambda: None, flat)


def recv(comm: Communicator, x: Any, peer: int, tag: int) -> Messages:
    request, collect = _post_recv(comm, "recv", x, peer, tag)
    return _work(comm, f"recv from rank {peer}, tag {tag}", [request], collect)


def send_recv(comm: Communicator, x: Any, peer: int, out: Any, source: int, tag: int) -> Messages:
    arriving, collect = _post_recv(comm, "send_recv", out, source, tag)
    request, flat = _post_send(comm, "send_recv", x, peer, tag)
    text = f"send_recv to rank {peer} and from rank {source}, tag {tag}"
    return _work(comm, text, [arriving, request], collect, flat)
