"""Shared memory of the ranks of one node: a memory file per rank, mapped by all of them.

It does not use MPI's shared windows, because of their end: MPI_Finalize frees windows that are still open, one after
the other, each collectively, in the order of their creation in this process. If threads created them in another order
on another rank, that hangs. A mapping ends with its last array, or with its process.

The files are unnamed, so a killed job never leaves any: the other ranks open them in /proc, through the descriptor of
the creating process. If that is not permitted, for example because each rank is in a separate container, the files have
names until all ranks have mapped them; the next job removes files of killed jobs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from commlib.buffers import available_memory as memory
from commlib.errors import TransportError

FOLDER = "/dev/shm"

# Bytes allocated between checks of the available memory, because the other ranks allocate at the same time. Below
# `_MUCH` bytes there is no check: it takes a millisecond.
_PIECE, _MUCH = 64 << 20, 16 << 20

_PROT_READ_WRITE, _MAP_SHARED, _MAP_POPULATE = 0x3, 0x1, 0x8000
_MFD_CLOEXEC = 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """A file mapped into this process, as long as this object lives. (Python's mmap keeps a descriptor open.)"""

    __slots__ = ("__weakref__", "address")

    def __init__(self, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            flags = _MAP_SHARED | _MAP_POPULATE
            self.address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, flags, descriptor, 0)
        finally:
            os.close(descriptor)
        if self.address == _FAILED:
            raise _error(path)
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False  # arrays may outlive the interpreter


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


class Segment:
    """`nbytes` of zeroed shared memory per rank: see `protocols.SharedMemory`."""

    def __init__(self, mappings: Sequence[Mapping], nbytes: int, *, is_named: bool) -> None:
        self.mappings = list(mappings)
        self.is_named = is_named  # these ranks cannot share unnamed files
        self.bases = [mapping.address for mapping in mappings]
        self.nbytes = nbytes

    def close(self) -> None:
        self.mappings.clear()


class _TryNamedError(TransportError):
    """A rank could not create its memory or map another rank's, for a reason other than lack of memory."""


def share(rank: int, nbytes: int, gather: Callable[[Any], list[Any]]) -> Segment:
    """Return shared memory of all ranks of a node. Collective; `gather` all-gathers a value of each rank.

    Raises TransportError on all ranks if one of them cannot get its memory.
    """
    try:
        return _share(rank, nbytes, gather, create_unnamed)
    except _TryNamedError:
        return _share(rank, nbytes, gather, create_named)


def _share(rank: int, nbytes: int, gather: Callable[[Any], list[Any]], make: Any) -> Segment:
    name = f"commlib-{os.getpid()}-{secrets.token_hex(8)}"
    mappings: list[Mapping] = []

    def everywhere(step: Callable[[], Any]) -> list[Any]:
        answer, error, is_short = None, "", False
        try:
            answer = step()
        except OSError as caught:
            error, is_short = f"rank {rank} of the node: {caught}", caught.errno in (errno.ENOMEM, errno.ENOSPC)
        answers = gather((answer, error, is_short))
        if errors := [error for _, error, _ in answers if error]:
            kind = TransportError if any(is_short for _, _, is_short in answers) else _TryNamedError
            raise kind(
                f"cannot share {nbytes} bytes of memory on each of {len(answers)} ranks ({'; '.join(errors)}): is "
                f"enough memory free (containers: --memory, and --shm-size if the error names {FOLDER}), and is the "
                f"same {FOLDER} seen by all ranks of the node?"
            )
        return [answer for answer, _, _ in answers]

    def create() -> tuple[str, str]:
        return allocate(stack.enter_context(make(name)), nbytes), name

    def map_all() -> None:
        for path, its_name in places:
            if its_name not in os.path.realpath(path):  # in this PID namespace the number means another process
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            mappings.append(Mapping(path, nbytes))

    with ExitStack() as stack:
        places = everywhere(create)
        everywhere(map_all)
    return Segment(mappings, nbytes, is_named=make is not create_unnamed)


@contextmanager
def create_unnamed(name: str) -> Iterator[str]:
    """Create an empty unnamed file; yield the path by which this user's processes can open it meanwhile."""
    try:
        descriptor = _libc.memfd_create(name.encode(), _MFD_CLOEXEC)  # Python's own may be missing in its build
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create") from None
    if descriptor < 0:
        raise _error("memfd_create")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)  # the memory lives as long as it is mapped


@contextmanager
def create_named(name: str) -> Iterator[str]:
    """Create an empty named file and yield its path; a lock on it shows `sweep` of any process that it is in use."""
    path = f"{FOLDER}/{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield path
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def allocate(path: str, nbytes: int) -> str:
    """Allocate a file's memory. Lack of memory raises here, instead of SIGBUS or the OOM killer later."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for start in range(0, nbytes, _PIECE):
            if nbytes > _MUCH and nbytes - start > (available := memory.available_bytes()):
                raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, {available} bytes are available")
            os.posix_fallocate(descriptor, start, min(_PIECE, nbytes - start))
    finally:
        os.close(descriptor)
    return path


def sweep() -> None:
    """Remove this user's named files that killed processes have left."""
    for path in Path(FOLDER).glob("commlib-*-*"):
        with suppress(OSError, ValueError):
            status = path.stat(follow_symlinks=False)
            process = int(path.name.split("-")[1])
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not may_own(process, status.st_ctime):
                _remove_unlocked(path)


def may_own(process: int, created: float) -> bool:
    """Return whether a running process `process` may have created a file at time `created`; numbers are reused."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        age = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and time.time() - age < created + 2


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if in use, even in another container
        path.unlink()
    finally:
        os.close(descriptor)
