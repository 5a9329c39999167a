"""Peer memory: shared memory of two processes, without a collective. One creates it and sends its place.

It is created like the node's shared memory (see `shared_memory`). Other processes can open it until `withdraw`, which
its creator calls once the peer has mapped it. After that both may release it independently.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from contextlib import ExitStack
from typing import Any

import numpy as np

from commlib.buffers import shared_memory
from commlib.dtypes import Array
from commlib.errors import TransportError

MemoryPlace = tuple[str, str, int]
"""The place of shared memory for other processes: the file's path, a name within the path, and the bytes."""


class PeerMemory:
    """`nbytes` of zeroed shared memory that another process can map. Raises TransportError if memory is short."""

    def __init__(self, nbytes: int, *, is_named: bool) -> None:
        name = f"commlib-{os.getpid()}-{secrets.token_hex(8)}"
        make: Any = shared_memory.create_named if is_named else shared_memory.create_unnamed
        self._found = ExitStack()
        try:
            path = self._found.enter_context(make(name))
            shared_memory.allocate(path, nbytes)
            self.memory = PeerMapping((path, name, nbytes))
        except OSError as error:
            self._found.close()
            raise TransportError(
                f"cannot share {nbytes} bytes of memory with another rank ({error}): is enough memory free "
                f"(containers: --memory, and --shm-size if the error names {shared_memory.FOLDER})?"
            ) from None
        self.place: MemoryPlace = path, name, nbytes

    def withdraw(self) -> None:
        """Stop other processes from opening it. Idempotent."""
        self._found.close()


class PeerMapping:
    """A mapping of a place's memory, as long as this object or one of its arrays lives. Raises OSError."""

    def __init__(self, place: MemoryPlace) -> None:
        path, name, self.nbytes = place
        if name not in os.path.realpath(path):  # in this PID namespace the number means another process
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._mapping = shared_memory.Mapping(path, self.nbytes)
        self.address: int = self._mapping.address

    def array(self, offset: int, nbytes: int) -> Array:
        """Return `nbytes` of it at `offset` as a uint8 array."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        owner: Any = (ctypes.c_uint8 * nbytes).from_address(self.address + offset)
        owner.mapping = self._mapping
        return np.frombuffer(owner, np.uint8)
