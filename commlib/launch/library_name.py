"""Library alias: load a shared library under another name, by an empty library that depends on it."""

from __future__ import annotations

import ctypes
import struct
import tempfile
from pathlib import Path

_HEADER = "<16sHHIQQQIHHHHHH"
_PROGRAM = "<IIQQQQQQ"
_LOAD, _DYNAMIC, _STACK, _READ_WRITE = 1, 2, 0x6474E551, 6
_END, _NEEDED, _HASH, _STRINGS, _SYMBOLS, _STRINGS_BYTES, _SYMBOL_BYTES, _SONAME = 0, 1, 4, 5, 6, 10, 11, 14


def load_as(name: str, library: str) -> None:
    """Load `library` for other libraries that were linked against `name`. Raises OSError if it cannot be loaded.

    The loader compares the name stored inside a library (SONAME), so neither a symlink nor another path helps.
    """
    with tempfile.NamedTemporaryFile(suffix=name) as file:
        file.write(_empty_library(name, library))
        file.flush()
        ctypes.CDLL(file.name)  # stays loaded


def _empty_library(name: str, needed: str) -> bytes:
    """Return an ELF file with a dynamic section and no other content."""
    machine, flags = struct.unpack_from("<18xH28xI", Path("/proc/self/exe").read_bytes()[:64])
    strings = f"\0{name}\0{needed}\0".encode()
    dynamic_at = 64 + 3 * 56
    hash_at = dynamic_at + 8 * 16
    symbols_at = hash_at + 16
    strings_at = symbols_at + 24
    length = strings_at + len(strings)
    dynamic = [
        (_NEEDED, len(name) + 2),
        (_SONAME, 1),
        (_HASH, hash_at),
        (_STRINGS, strings_at),
        (_SYMBOLS, symbols_at),
        (_STRINGS_BYTES, len(strings)),
        (_SYMBOL_BYTES, 24),
        (_END, 0),
    ]
    return b"".join(
        [
            struct.pack(_HEADER, b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 0, flags, 64, 56, 3, 64, 0, 0),
            struct.pack(_PROGRAM, _LOAD, _READ_WRITE, 0, 0, 0, length, length, 1 << 16),
            struct.pack(_PROGRAM, _DYNAMIC, _READ_WRITE, *[dynamic_at] * 3, 8 * 16, 8 * 16, 8),
            struct.pack(_PROGRAM, _STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16),
            *(struct.pack("<QQ", *entry) for entry in dynamic),
            struct.pack("<4I", 1, 1, 0, 0),  # one bucket and one symbol, the null symbol
            bytes(24),
            strings,
        ]
    )
