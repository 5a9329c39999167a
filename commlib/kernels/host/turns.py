"""One process of a node compiles a kernel, the others wait until they can load it.

Locks are bytes of one file in a folder of the node, a byte for each name. The system releases them when a process ends,
however it ends. They are not in the folder of kernels, because that may be on a network: there locks may be missing,
slow or without answer, and all nodes would ask for them at once. None is taken for a kernel that is there. Nobody waits
in a circle: who holds the lock of a kernel and waits for another one is compiling what that one is a part of.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from commlib import folders
from commlib.kernels.host.cache import folder, node_folders, open_own, said_once

log = logging.getLogger("commlib")

LONGEST_WAIT = 120.0  # seconds; compiling one takes 0.2 to 5, and a stopped process must not stop all
SILENT = 1.0  # seconds of compiling and waiting in all before they are worth a line
POLL = 0.05  # seconds between two looks whether another process has compiled it
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def turn(name: str, is_there: Callable[[], bool]) -> Iterator[None]:
    """Enter with the lock of a name, to compile what it names, or as soon as another process has.

    Without the lock where there are no locks, and where the other process takes longer than `LONGEST_WAIT`.
    """
    if is_there():
        yield
        return
    with delay().counted():
        locks = lock_file()
        held = locks is not None and _wait(locks, name, is_there)
        try:
            yield
        finally:
            if locks is not None and held:
                with suppress(OSError):  # where the file system went away the lock did as well
                    fcntl.lockf(locks, fcntl.LOCK_UN, 1, _byte(name))


def _wait(locks: int, name: str, is_there: Callable[[], bool]) -> bool:
    """Return whether the lock was taken; not if what it is for was there before, or cannot be waited for."""
    start = time.monotonic()
    while True:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte(name))
            return True
        except OSError as error:
            if error.errno not in _BUSY:
                log.info("no locks on this node (%s): every process compiles for itself", error.strerror)
                return False
        if is_there():
            return False
        delay().say()
        if (waited := time.monotonic() - start) > LONGEST_WAIT:
            log.warning("another process has compiled %s for %d s: now this one does as well", name, waited)
            return False
        time.sleep(POLL)


def _byte(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{folder()}/{name}".encode()).digest()[:7], "big")


@cache
def lock_file() -> int | None:
    """Return the open file of locks. It stays open: closing a file releases all locks that a process has in it."""
    if folder() is None:
        return None  # what another process compiles could not be loaded
    for place in node_folders():
        with suppress(OSError), folders.private(place, create=True) as here:
            return open_own("locks", here)
    return None


@dataclass(slots=True)
class _Delay:
    """How long kernels have kept this process, and whether that was said. Used under numba's compiler lock."""

    before: float = 0.0
    start: float = 0.0
    depth: int = 0  # kernels within kernels
    said: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        if not self.depth:
            self.start = time.monotonic()
        self.say()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.say()  # a process that compiles all by itself never waits, and its last kernel may take longest
                self.before += time.monotonic() - self.start

    def say(self) -> None:
        """Say what takes so long, once, if it does."""
        if self.said or self.before + time.monotonic() - self.start < SILENT:
            return
        self.said = True
        where = folder()
        how_often = f"once: 5 to 30 s in all (kept in {where})" if where else "5 to 30 s at each start"
        log.log(said_once(), "compiling kernels for this kind of CPU, %s", how_often)


@cache
def delay() -> _Delay:
    """Return how long kernels have kept this process, one object for all."""
    return _Delay()
