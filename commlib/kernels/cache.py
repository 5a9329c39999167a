"""Where compiled kernels are kept, so that only the first run on a kind of machine compiles them.

numba keeps one index for each function, and takes its own word for it: an index that two processes change at once may
name one's code for the other's (another dtype, or another kind of CPU in a shared home); and code compiled from another
version of a module that a function includes counts as fresh. So every CPU has a folder of its own, every specialisation
an index of its own, and the sources of all kernels together are what the code is as old as.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import caching

_SOURCES = Path(__file__).parent


def _digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


@cache
def _stamp() -> str:
    return _digest(*(path.read_bytes() for path in sorted(_SOURCES.glob("*.py"))))


def _cpu() -> str:
    return _digest(llvm.get_host_cpu_name().encode(), llvm.get_host_cpu_features().flatten().encode())


def _candidates() -> Iterator[Path]:
    """Give the folders to try: numba's setting, beside the sources, the user's cache, and whatever can be written."""
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR) / "commlib"
    yield _SOURCES / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/")) / ".cache") / "commlib"
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        yield Path(folder) / f"commlib-{os.getuid()}"


@cache
def folder() -> Path | None:
    """Return the folder in which code compiled on this kind of CPU is kept, or None if nothing can be written."""
    for candidate in _candidates():
        path = candidate / f"kernels-{_cpu()}"
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.stat().st_uid != os.getuid():
                continue  # what lies there would be run
            tempfile.TemporaryFile(dir=path).close()
        except OSError:
            continue
        return path
    return None


class _Locator:
    """Tells numba where the code of a function of this package is kept, and what it was made from."""

    def __init__(self, function: Any, path: Path) -> None:
        self._path = path
        cells = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        self._name = "-".join([str(function.__code__.co_firstlineno), _digest(*map(str.encode, cells))])

    def get_cache_path(self) -> str:
        return str(self._path)

    def ensure_cache_path(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get_source_stamp(self) -> str:
        return _stamp()

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, function: Any, file: str) -> _Locator | None:
        path = folder() if Path(file).parent == _SOURCES else None
        return None if path is None else cls(function, path)


_impl = getattr(caching, "CacheImpl", None) or caching._CacheImpl  # its name before numba 0.61
_impl._locator_classes.insert(0, _Locator)  # it leaves all other functions to those after it

CACHED = folder() is not None
"""Whether kernels can be kept; a process compiles its own where not."""
