"""Peer reading: try if this process may read another's memory (`process_vm_readv`), to copy without a stop in between.

Systems let a user's processes do so unless a security module or a container's filter forbids it. And a process of that
number may be another one than is meant, in another container. So it is tried, on a number that only the right one has.
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
    """A secret number of this process for others to read. place: its address and what is there."""

    def __init__(self) -> None:
        self._secret = np.array([secrets.randbits(62)], np.int64)
        self.place = (self._secret.ctypes.data, int(self._secret[0]))


def can_read(process: int, address: int, expected: int) -> bool:
    """Return whether the memory of a process can be read: its probe's number is `expected`."""
    call: Any = getattr(_libc, "process_vm_readv", None)
    if call is None or not address:
        return False
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    found = ctypes.c_int64()
    here, there = _Range(ctypes.addressof(found), 8), _Range(address, 8)
    read = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return bool(read == 8 and found.value == expected)
