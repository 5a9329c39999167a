"""Memory that one process makes and one other maps, without a collective: made here, told in a message, mapped there.

It is made as the node's shared memory is (see `shared_memory`), and can be found until `withdraw`, which its maker
calls once the other process has mapped it. Both may then let go of it when they like.
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

Place = tuple[str, str, int]
"""Where other processes find memory: the file's path, a name that occurs in it, and bytes."""


class PeerMemory:
    """`nbytes` of zeroed shared memory that another process can map. Raises TransportError if there is not so much."""

    def __init__(self, nbytes: int, *, is_named: bool) -> None:
        name = f"commlib-{os.getpid()}-{secrets.token_hex(8)}"
        make: Any = shared_memory.named if is_named else shared_memory.nameless
        self._found = ExitStack()
        try:
            path = self._found.enter_context(make(name))
            shared_memory.allocate(path, nbytes)
            self.memory = Mapped((path, name, nbytes))
        except OSError as error:
            self._found.close()
            raise TransportError(
                f"cannot share {nbytes} bytes of memory with another rank ({error}): is there so much (containers: "
                f"--memory, and --shm-size if {shared_memory.FOLDER} is named here)?"
            ) from None
        self.place: Place = path, name, nbytes

    def withdraw(self) -> None:
        """Let no other process find it any more. Idempotent."""
        self._found.close()


class Mapped:
    """Memory of a place, in this process, for as long as this object or an array of it lives. Raises OSError."""

    def __init__(self, place: Place) -> None:
        path, name, self.nbytes = place
        if name not in os.path.realpath(path):  # here the process of this number is another one
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._mapping = shared_memory.Mapping(path, self.nbytes)
        self.address: int = self._mapping.address

    def array(self, offset: int, nbytes: int) -> Array:
        """Return some of it as a uint8 array."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        owner: Any = (ctypes.c_uint8 * nbytes).from_address(self.address + offset)
        owner.mapping = self._mapping
        return np.frombuffer(owner, np.uint8)
