"""Cache: keep compiled kernels, so that only the first run on a kind of machine compiles them.

One file for each specialisation of a kernel, in a folder for each version of the sources, in the user's cache folder:
so versions and checkouts do not disturb each other, and what is installed stays as it was. A file is run by whoever
reads it. So it is read only where nobody else can have changed it, and only if it is whole and what its name says.
"""

from __future__ import annotations

import hashlib
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
from importlib import resources
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np

from commlib import folders

log = logging.getLogger("commlib")

MARK = "in-use"  # a file that is in every folder of kernels; opening it tells whether the folder can be written to
_PREFIX = "kernels-"
_DAY = 24 * 3600.0
_UNUSED = 30 * _DAY  # after that a folder of another version is removed
_CHECKSUM = hashlib.sha256().digest_size


def digest(*texts: bytes) -> str:
    """Return a short name for what a kernel was made from."""
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


@cache
def stamp() -> str:
    """Return what all compiled kernels depend on: their sources (they include each other), Python, numpy and numba."""
    sources = (item for item in resources.files(__package__).iterdir() if item.name.endswith(".py"))
    versions = (
        platform.python_version(),
        str(sysconfig.get_config_var("SOABI")),
        np.__version__,
        numba.__version__,
        llvmlite.__version__,
    )
    return digest(*map(str.encode, versions), *(item.read_bytes() for item in sorted(sources, key=lambda x: x.name)))


def candidates() -> Iterator[Path]:
    """Give the folders to try: those of the settings, the user's cache, and what is there on every node."""
    if given := os.environ.get("COMMLIB_KERNELS"):
        yield Path(given).absolute()
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR) / "commlib"
    yield folders.user_cache()
    yield from node_folders()


def node_folders() -> Iterator[Path]:
    """Give the folders of this user that are there on every node, and as a rule of this node alone."""
    for shared in (tempfile.gettempdir(), "/dev/shm"):
        yield Path(shared) / f"commlib-{os.geteuid()}"


def said_once() -> int:
    """Return the level at which to log what holds for all ranks: for rank 0, and outside MPI, that of a warning."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_first = mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.rank == 0
    return logging.WARNING if is_first else logging.INFO


@cache
def folder() -> Path | None:
    """Return the folder that kernels are kept in, or None if there is none that is private and can be written."""
    refused = []
    for candidate in candidates():
        path = candidate / f"{_PREFIX}{stamp()}"
        try:
            with folders.private(path, create=True) as here:
                is_new = MARK not in os.listdir(path)
                os.close(open_own(MARK, here))
            if is_new or time.time() - path.stat().st_mtime > _DAY:
                with suppress(OSError):  # another process was faster
                    _clean_up(path)
        except OSError as error:
            refused.append(_reason(path, error))
            continue
        if refused:
            log.info("compiled kernels are kept in %s; elsewhere they cannot be: %s", path, "; ".join(refused))
        return path
    log.log(
        said_once(),
        "compiled kernels cannot be kept, so every process compiles its own: %s. Set XDG_CACHE_HOME to a folder that "
        "you alone can write to, in folders that are yours or root's",
        "; ".join(refused),
    )
    return None


def open_own(name: str, folder: int) -> int:
    """Open a file in an opened folder to write to it, and make it if there is none. Raises OSError."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _reason(path: Path, error: OSError) -> str:
    return f"{path}: {error}" if isinstance(error, folders.NotPrivateError) else f"{path}: {error.strerror}"


@cache
def ready_made() -> tuple[Path, ...]:
    """Return the folders of kernels that this user can read, but not write to: a site's, or those of a container."""
    found = []
    for candidate in candidates():
        path = candidate / f"{_PREFIX}{stamp()}"
        if path != folder():
            with suppress(OSError), folders.private(path) as here:
                folders.read_private(MARK, here)
                found.append(path)
    return tuple(found)


def read(name: str) -> bytes | None:
    """Return what was kept under a name, or None if nothing was, or nothing that is fit to be run."""
    if (where := folder()) is not None and (data := _read(name, where)) is not None:
        return data
    return next((data for place in ready_made() if (data := _read(name, place)) is not None), None)


def _read(name: str, where: Path) -> bytes | None:
    try:
        with folders.private(where) as here:
            content = folders.read_private(name, here)
    except FileNotFoundError:
        return None
    except OSError as error:
        say_once(f"compiled kernels are not taken from {_reason(where, error)}; they are compiled anew")
        return None
    checksum, data = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum == _checksum(name, data):
        return data
    if where == folder():
        discard(name, "is damaged")
    else:
        say_once(f"the compiled kernel {where / name} is damaged")
    return None


def write(name: str, data: bytes) -> None:
    """Keep something under a name, for `read` in this and other processes; say so if that is not possible."""
    if (where := folder()) is None:
        return
    try:
        with folders.private(where, create=True) as here:
            folders.write_private(name, here, _checksum(name, data) + data)
    except OSError as error:
        say_once(f"compiled kernels cannot be kept in {_reason(where, error)}")


def discard(name: str, why: str) -> None:
    """Remove a file that is of no use, and say so; of several processes that come upon it, one does."""
    if (where := folder()) is None:
        return
    with suppress(OSError), folders.private(where) as here:
        os.unlink(name, dir_fd=here)
        log.warning("the compiled kernel %s %s: it is compiled anew", where / name, why)


def _checksum(name: str, data: bytes) -> bytes:
    """Return what a file begins with. Its name is part of it, so that no file passes for another one."""
    return hashlib.sha256(b"\0".join((stamp().encode(), name.encode(), data))).digest()


@cache
def say_once(text: str) -> None:
    """Log a line, unless this process has logged it before."""
    log.log(said_once(), text)


def _clean_up(path: Path) -> None:
    """Remove what other versions left and nobody has used for long, and what writers left that were killed.

    Once a day at most. That is also how the time of a folder says, to a day, when it was last used.
    """
    now = time.time()
    os.utime(path, (now, now))
    for other in path.parent.glob(f"{_PREFIX}*"):
        if other != path and now - other.stat().st_mtime > _UNUSED:
            log.info("removing the compiled kernels in %s: not used for %d days", other, _UNUSED / _DAY)
            shutil.rmtree(other, ignore_errors=True)  # whoever does use them compiles anew
    for unfinished in path.glob("*.new"):
        if now - unfinished.stat().st_mtime > _DAY:
            unfinished.unlink()
