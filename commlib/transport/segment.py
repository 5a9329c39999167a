"""Shared memory of the ranks of one node: a file in memory for each rank, mapped by all of them.

MPI's shared windows would do as well but for their end: MPI frees those that are left open in MPI_Finalize, one after
the other, each waiting for all ranks, in the order in which this process made them. Threads that make them in another
order on another rank then hang there. A mapping ends with its process, and with the last array in it before that.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from commlib.errors import TransportError

FOLDER = "/dev/shm"

_PROT_READ_WRITE, _MAP_SHARED, _MAP_POPULATE = 0x3, 0x1, 0x8000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Mapping:
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
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False  # arrays may outlive Python's end


class Segment:
    """`nbytes` of zeroed shared memory for each rank: see `typing.SharedMemory`."""

    def __init__(self, mappings: Sequence[_Mapping], nbytes: int) -> None:
        self._mappings = list(mappings)
        self.bases = [mapping.address for mapping in mappings]
        self.nbytes = nbytes

    def close(self) -> None:
        self._mappings.clear()


def share(rank: int, nbytes: int, gather: Callable[[Any], list[Any]]) -> Segment:
    """Return shared memory of all ranks of a node. Collective; `gather` tells every rank's value to all.

    Raises TransportError on all ranks if one of them cannot have its part.
    """
    path = f"{FOLDER}/commlib-{os.getpid()}-{secrets.token_hex(8)}"
    mappings: list[_Mapping] = []

    def everywhere(step: Callable[[], str]) -> list[str]:
        try:
            answer, error = step(), ""
        except OSError as caught:
            answer, error = "", f"rank {rank} of the node: {caught}"
        answers = gather((answer, error))
        if errors := [error for _, error in answers if error]:
            raise TransportError(
                f"cannot share {nbytes} bytes of memory on each of {len(answers)} ranks ({'; '.join(errors)}): is "
                f"{FOLDER} large enough (containers: --shm-size or --ipc=host), and seen by all ranks of the node?"
            )
        return [answer for answer, _ in answers]

    def map_all() -> str:
        mappings.extend(_Mapping(other, nbytes) for other in paths)
        return ""

    try:
        paths = everywhere(lambda: _create(path, nbytes))
        everywhere(map_all)
    finally:
        with suppress(OSError):
            os.unlink(path)  # the memory stays for as long as it is mapped
    return Segment(mappings, nbytes)


def _create(path: str, nbytes: int) -> str:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # memory that is missing is told here, not by SIGBUS
    finally:
        os.close(descriptor)
    return path
