"""Peer reading: test whether this process can read a peer's memory (`process_vm_readv`), to copy it directly.

Systems allow it between a user's processes unless a security module or a container's filter forbids it. In another
container the process number may mean another process. So the test reads a secret that only the right process has.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None)


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Probe:
    """A secret number in this process for peers to read. place: its address and its value."""

    def __init__(self) -> None:
        self._secret = np.array([secrets.randbits(62)], np.int64)
        self.place = (self._secret.ctypes.data, int(self._secret[0]))


def can_read(process: int, address: int, expected: int) -> bool:
    """Return whether this process can read the memory of `process`, whose probe holds `expected` at `address`."""
    call: Any = getattr(_libc, "process_vm_readv", None)
    if call is None or not address:
        return False
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    buffer = ctypes.c_int64()
    local, remote = _Range(ctypes.addressof(buffer), 8), _Range(address, 8)
    read = call(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return bool(read == 8 and buffer.value == expected)
