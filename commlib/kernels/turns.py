"""One process of a node compiles a kernel, the others wait until they can load it.

Locks are ranges of bytes in one file beside the kernels, a byte for each name. The system releases them when a process
ends, however it ends, and they work between hosts that share a home, where its file system has locks. None is taken for
a kernel that is there. Nobody waits in a circle: who holds the lock of a kernel and waits for another one is compiling
what that one is a part of.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from commlib import folders
from commlib.kernels.cache import folder, open_locks

log = logging.getLogger("commlib")

LONGEST_WAIT = 120.0  # seconds; compiling one takes 0.2 to 5, and a stopped process must not stop all
_WORTH_A_LINE = 10.0  # seconds of waiting for one kernel
_SILENT = 1.0  # seconds of compiling in all before it is worth a line
_POLL = 0.05
_SPEAKER = 0  # the byte whose holder speaks for all
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def turn(name: str, is_there: Callable[[], bool]) -> Iterator[None]:
    """Enter with the lock of a name, to compile what it names, or as soon as another process has.

    Without the lock where there are no locks, and where the other process takes longer than `LONGEST_WAIT`.
    """
    if is_there():
        yield
        return
    locks = _locks()
    held = locks is not None and _wait(locks, name, is_there)
    try:
        with _progress().compiling():
            yield
    finally:
        if locks is not None and held:
            with suppress(OSError):  # where the file system went away the lock did as well
                fcntl.lockf(locks, fcntl.LOCK_UN, 1, _byte(name))


def _wait(locks: int, name: str, is_there: Callable[[], bool]) -> bool:
    """Return whether the lock was taken; not if what it is for was there before, or cannot be waited for."""
    start, said = time.monotonic(), False
    while True:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(name))
            return True
        except OSError as error:
            if error.errno not in _BUSY:
                log.info("no locks in %s (%s): every process compiles for itself", folder(), error.strerror)
                return False
        if is_there():
            return False
        waited = time.monotonic() - start
        if waited > LONGEST_WAIT:
            log.warning("another process has compiled %s for %d s: now this one does as well", name, waited)
            return False
        if waited > _WORTH_A_LINE and not said:
            said = True
            if _may_speak():
                text = "waiting for another process to compile %s in %s; after %d s this one does"
                log.warning(text, name, folder(), LONGEST_WAIT)
        time.sleep(_POLL)


def _byte(name: str) -> int:
    return 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


@cache
def _locks() -> int | None:
    """Return the open file of locks. It stays open: closing a file releases all locks that a process has in it."""
    if (where := folder()) is None:
        return None
    try:
        with folders.private(where) as here:
            return open_locks(here)
    except OSError:
        return None  # `cache` says why


def _may_speak() -> bool:
    """Return whether this process speaks for all that use the folder; rank 0 does where they cannot find out."""
    if (locks := _locks()) is not None:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _SPEAKER)  # until this process ends
            return True
        except OSError as error:
            if error.errno in _BUSY:
                return False
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is None or not mpi.Is_initialized() or bool(mpi.COMM_WORLD.rank == 0)


@dataclass(slots=True)
class _Progress:
    """How long this process has been compiling, and whether that was said. Used under numba's compiler lock."""

    spent: float = 0.0
    depth: int = 0  # kernels within kernels
    start: float = 0.0
    said: bool = False

    @contextmanager
    def compiling(self) -> Iterator[None]:
        now = time.monotonic()
        if not self.depth:
            self.start = now
        if not self.said and self.spent + now - self.start > _SILENT:
            self.said = True
            if _may_speak():
                log.warning("compiling kernels for this kind of CPU, %s", _once())
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.spent += time.monotonic() - self.start


def _once() -> str:
    where = folder()
    return f"once: 5 to 30 s in all (kept in {where})" if where else "5 to 30 s at each start"


@cache
def _progress() -> _Progress:
    return _Progress()
