"""Compile locks: let one process of a node compile a kernel, while the others wait until they can load it.

The locks are bytes of one file in a node-local folder, one byte per name. The system releases them when a process ends
for any reason. The file is not in the folder of kernels, which may be on a network file system, where locks may be
missing, slow or unanswered, and contended by all nodes. No lock is taken for a kernel that is already compiled. There
is no deadlock: a process that holds the lock of one kernel and waits for another is compiling a caller of the other.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from commlib import folders
from commlib.kernels.cache import MARK, folder, node_folders, open_own, shared_log_level

log = logging.getLogger("commlib")

LONGEST_WAIT = 120.0  # seconds; a kernel compiles in 0.2 to 5 s, and a stopped process must not stop all
SILENT = 1.0  # total seconds of compiling and waiting before they are logged
POLL = 0.05  # seconds between two checks for the other process's result
_BUSY = (errno.EACCES, errno.EAGAIN)


@contextmanager
def lock_compilation(name: str, is_there: Callable[[], bool]) -> Iterator[None]:
    """Enter with the lock of a name, to compile its kernel, or as soon as another process has compiled it.

    Enters without the lock if the node has no locks, or if the other process takes longer than `LONGEST_WAIT`.
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
                with suppress(OSError):  # if the file system has vanished, so has the lock
                    fcntl.lockf(locks, fcntl.LOCK_UN, 1, _byte(name))


def _wait(locks: int, name: str, is_there: Callable[[], bool]) -> bool:
    """Return True with the lock; False if the kernel was compiled meanwhile, or if the lock is unavailable."""
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
        delay().warn()
        if (waited := time.monotonic() - start) > LONGEST_WAIT:
            log.warning("another process has been compiling %s for %d s: now this process does, too", name, waited)
            return False
        time.sleep(POLL)


def _byte(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{folder()}/{name}".encode()).digest()[:7], "big")


@cache
def lock_file() -> int | None:
    """Return the open file of locks. It stays open: closing a file releases all locks that a process has in it."""
    if folder() is None:
        return None  # code that another process compiles could not be loaded
    for place in node_folders():
        with suppress(OSError), folders.open_private(place, create=True) as here:
            return open_own("locks", here)
    return None


@dataclass(slots=True)
class _Delay:
    """The kernels that have delayed this process, their time, and whether it was logged.

    Used under numba's compiler lock.
    """

    before: float = 0.0
    start: float = 0.0
    depth: int = 0  # kernels within kernels
    has_warned: bool = False
    kernels: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        if not self.depth:
            self.start = time.monotonic()
        self.kernels += 1
        self.warn()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.warn()  # a process that compiles alone never waits, and its last kernel may take longest
                self.before += time.monotonic() - self.start

    def warn(self) -> None:
        """Log the reason for a long delay, once."""
        if self.has_warned or self.before + time.monotonic() - self.start < SILENT:
            return
        self.has_warned = True
        where = folder()
        log.log(shared_log_level(), "compiling kernels for this kind of CPU, %s", _how_often(self.kernels, where))


def _how_often(number: int, where: Path | None) -> str:
    if where is None:
        return f"{number} so far: 5 to 30 s at each start"
    return (
        f"once: {number} so far, 5 to 30 s in total (stored in {where}, where {_count_stored(where)} are); "
        "'commlib warm' compiles all of them ahead of jobs"
    )


def _count_stored(where: Path) -> int:
    with suppress(OSError):
        return sum(name != MARK and not name.endswith(".new") for name in os.listdir(where))
    return 0


@cache
def delay() -> _Delay:
    """Return the delay of this process, a single object."""
    return _Delay()
