"""Cache: store compiled kernels on disk, so only the first run on each type of machine compiles them.

There is one file per specialization of a kernel, and one folder per version of the sources, in the user's cache folder.
Versions and checkouts therefore do not disturb each other, and the installation stays unchanged. Reading a file runs
its code. A file is read only if nobody else can have changed it, and if it is complete and matches its name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from commlib import folders

log = logging.getLogger("commlib")

MARK = "in-use"  # a file in every folder of kernels; opening it shows whether the folder is writable
_PREFIX = "kernels-"
_DAY = 24 * 3600.0
_UNUSED = 30 * _DAY  # age at which a folder of another version is removed
_CHECKSUM = hashlib.sha256().digest_size


def digest(*texts: bytes) -> str:
    """Return a short digest of a kernel's inputs."""
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


@cache
def stamp() -> str:
    """Return a digest of everything that all compiled kernels depend on: their sources, Python, numpy and numba."""
    here = Path(__file__).parent
    sources = sorted(path for folder in ("host", "fields") for path in (here / folder).glob("*.py"))
    versions = (
        platform.python_version(),
        str(sysconfig.get_config_var("SOABI")),
        np.__version__,
        llvmlite.__version__,
    )
    return digest(*map(str.encode, versions), _numba_version(), *(path.read_bytes() for path in sources))


def _numba_version() -> bytes:
    """Return what tells numba's version. Importing it would take 0.3 s."""
    spec = importlib.util.find_spec("numba")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("_version.py").read_bytes()


def candidates() -> Iterator[Path]:
    """Yield the folders to try: from the settings, in the user's cache, and local to the node."""
    if given := os.environ.get("COMMLIB_KERNELS"):
        yield Path(given).absolute()
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(given) / "commlib"
    yield folders.user_cache()
    yield from node_folders()


def node_folders() -> Iterator[Path]:
    """Yield this user's folders that exist on every node, and are usually local to it."""
    for shared in (tempfile.gettempdir(), "/dev/shm"):
        yield Path(shared) / f"commlib-{os.geteuid()}"


def shared_log_level() -> int:
    """Return the log level for a message that applies to all ranks: a warning on rank 0 and outside MPI, else info."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_first = mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.rank == 0
    return logging.WARNING if is_first else logging.INFO


@cache
def folder() -> Path | None:
    """Return the folder for kernels, or None if there is no private writable one."""
    refused = []
    for candidate in candidates():
        path = candidate / f"{_PREFIX}{stamp()}"
        try:
            with folders.open_private(path, create=True) as here:
                is_new = MARK not in os.listdir(path)
                os.close(open_own(MARK, here))
            if is_new or time.time() - path.stat().st_mtime > _DAY:
                with suppress(OSError):  # another process was faster
                    _clean_up(path)
        except OSError as error:
            refused.append(_reason(path, error))
            continue
        if refused:
            log.info("compiled kernels are stored in %s; other folders were rejected: %s", path, "; ".join(refused))
        return path
    log.log(
        shared_log_level(),
        "compiled kernels cannot be stored, so every process compiles them: %s. Set XDG_CACHE_HOME to a folder that "
        "only you can write to, with parent folders that belong to you or root",
        "; ".join(refused),
    )
    return None


def open_own(name: str, folder: int) -> int:
    """Open a file in an opened folder for writing, and create it if necessary. Raises OSError."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _reason(path: Path, error: OSError) -> str:
    return f"{path}: {error}" if isinstance(error, folders.NotPrivateError) else f"{path}: {error.strerror}"


@cache
def find_site_folders() -> tuple[Path, ...]:
    """Return the kernel folders that this user can read, but not write to: those of a site or a container."""
    site_folders = []
    for candidate in candidates():
        path = candidate / f"{_PREFIX}{stamp()}"
        if path != folder():
            with suppress(OSError), folders.open_private(path) as here:
                folders.read_private(MARK, here)
                site_folders.append(path)
    return tuple(site_folders)


def read(name: str) -> bytes | None:
    """Return the data stored under a name, or None if there is none that is safe to run."""
    if (where := folder()) is not None and (data := _read(name, where)) is not None:
        return data
    return next((data for place in find_site_folders() if (data := _read(name, place)) is not None), None)


def _read(name: str, where: Path) -> bytes | None:
    try:
        with folders.open_private(where) as here:
            content = folders.read_private(name, here)
    except FileNotFoundError:
        return None
    except OSError as error:
        log_once(f"compiled kernels are not loaded from {_reason(where, error)}; they are compiled again")
        return None
    checksum, data = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum == _checksum(name, data):
        return data
    if where == folder():
        discard(name, "is damaged")
    else:
        log_once(f"the compiled kernel {where / name} is damaged")
    return None


def write(name: str, data: bytes) -> None:
    """Store data under a name, for `read` in this and other processes. Logs a failure."""
    if (where := folder()) is None:
        return
    try:
        with folders.open_private(where, create=True) as here:
            folders.write_private(name, here, _checksum(name, data) + data)
    except OSError as error:
        log_once(f"compiled kernels cannot be stored in {_reason(where, error)}")


def read_code(name: str) -> tuple[str, bytes] | None:
    """Return the symbol and the machine code stored under a name, or None if there is none that is safe to run."""
    if (data := read(name)) is None:
        return None
    symbol, _, code = data.partition(b"\0")
    return symbol.decode(), code


def write_code(name: str, symbol: str, code: bytes) -> None:
    """Store machine code under a name, for `read_code`. Logs a failure."""
    write(name, symbol.encode() + b"\0" + code)


def discard(name: str, why: str) -> None:
    """Remove a useless file and log it. If several processes find it, only one logs it."""
    if (where := folder()) is None:
        return
    with suppress(OSError), folders.open_private(where) as here:
        os.unlink(name, dir_fd=here)
        log.warning("the compiled kernel %s %s: it is compiled again", where / name, why)


def _checksum(name: str, data: bytes) -> bytes:
    """Return the checksum at the beginning of a file. It includes the name, so one file cannot pass for another."""
    return hashlib.sha256(b"\0".join((stamp().encode(), name.encode(), data))).digest()


@cache
def log_once(text: str) -> None:
    """Log a line, once per process."""
    log.log(shared_log_level(), text)


def _clean_up(path: Path) -> None:
    """Remove long-unused folders of other versions, and temporary files of killed writers.

    It runs once a day at most. A folder's modification time therefore shows the day of its last use.
    """
    now = time.time()
    os.utime(path, (now, now))
    for other in path.parent.glob(f"{_PREFIX}*"):
        if other != path and now - other.stat().st_mtime > _UNUSED:
            log.info("removing the compiled kernels in %s: not used for %d days", other, _UNUSED / _DAY)
            shutil.rmtree(other, ignore_errors=True)  # a process that still uses them compiles again
    for unfinished in path.glob("*.new"):
        if now - unfinished.stat().st_mtime > _DAY:
            unfinished.unlink()
