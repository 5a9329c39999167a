"""Shared memory of the ranks of one node: a file in memory for each rank, mapped by all of them.

MPI's shared windows would do as well but for their end: MPI frees those that are left open in MPI_Finalize, one after
the other, each waiting for all ranks, in the order in which this process made them. Threads that make them in another
order on another rank then hang there. A mapping ends with its process, and with the last array in it before that.

The files have no names, so nothing is left of a job that is killed, whenever that is: the others open them through the
descriptor of the process that made them, in /proc. Where they may not, because each rank is in a container of its own
for example, the files have names until all have mapped them; what killed jobs leave then is swept by the next one.
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

from commlib.buffers import available as memory
from commlib.errors import TransportError

FOLDER = "/dev/shm"

# So much is allocated at a time, between looks at what is left: the other ranks take theirs meanwhile. For less than
# `_MUCH` nobody looks: that takes a millisecond.
_PIECE, _MUCH = 64 << 20, 16 << 20

_PROT_READ_WRITE, _MAP_SHARED, _MAP_POPULATE = 0x3, 0x1, 0x8000
_MFD_CLOEXEC = 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """A file's memory in this process, for as long as this object lives. (Python's mmap keeps a descriptor open.)"""

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
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False  # arrays may outlive Python's end


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


class Segment:
    """`nbytes` of zeroed shared memory for each rank: see `typing.SharedMemory`."""

    def __init__(self, mappings: Sequence[Mapping], nbytes: int, *, is_named: bool) -> None:
        self.mappings = list(mappings)
        self.is_named = is_named  # files without names cannot be shared among these ranks
        self.bases = [mapping.address for mapping in mappings]
        self.nbytes = nbytes

    def close(self) -> None:
        self.mappings.clear()


class _TryNamedError(TransportError):
    """Some rank could not make its memory, or not map another's, and not because there is too little."""


def share(rank: int, nbytes: int, gather: Callable[[Any], list[Any]]) -> Segment:
    """Return shared memory of all ranks of a node. Collective; `gather` tells every rank's value to all.

    Raises TransportError on all ranks if one of them cannot have its part.
    """
    try:
        return _share(rank, nbytes, gather, nameless)
    except _TryNamedError:
        return _share(rank, nbytes, gather, named)


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
                f"there so much (containers: --memory, and --shm-size if {FOLDER} is named here), and is {FOLDER} "
                "seen by all ranks of the node?"
            )
        return [answer for answer, _, _ in answers]

    def create() -> tuple[str, str]:
        return allocate(stack.enter_context(make(name)), nbytes), name

    def map_all() -> None:
        for path, its_name in places:
            if its_name not in os.path.realpath(path):  # here the process of this number is another one
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            mappings.append(Mapping(path, nbytes))

    with ExitStack() as stack:
        places = everywhere(create)
        everywhere(map_all)
    return Segment(mappings, nbytes, is_named=make is not nameless)


@contextmanager
def nameless(name: str) -> Iterator[str]:
    """Make an empty file without a name; yield the path by which processes of this user find it meanwhile."""
    try:
        descriptor = _libc.memfd_create(name.encode(), _MFD_CLOEXEC)  # Python has it only where it was built with it
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "memfd_create") from None
    if descriptor < 0:
        raise _error("memfd_create")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)  # the memory stays for as long as it is mapped


@contextmanager
def named(name: str) -> Iterator[str]:
    """Make an empty file, and yield its path; its lock tells `sweep` that it is in use, whoever may look."""
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
    """Give a file its memory. What is missing is told here, not by SIGBUS or the kernel's choice of a victim."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for start in range(0, nbytes, _PIECE):
            if nbytes > _MUCH and nbytes - start > (available := memory.available()):
                raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}, {available} bytes are available")
            os.posix_fallocate(descriptor, start, min(_PIECE, nbytes - start))
    finally:
        os.close(descriptor)
    return path


def sweep() -> None:
    """Remove the named files of this user whose processes were killed before they could."""
    for path in Path(FOLDER).glob("commlib-*-*"):
        with suppress(OSError, ValueError):
            found = path.stat(follow_symlinks=False)
            process = int(path.name.split("-")[1])
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not may_own(process, found.st_ctime):
                _remove_unlocked(path)


def may_own(process: int, made: float) -> bool:
    """Return whether a process is there that may have made a file at this time: its number may be in use again."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        age = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and time.time() - age < made + 2


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is in use: in another container, say
        path.unlink()
    finally:
        os.close(descriptor)
