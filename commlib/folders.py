"""Folders: find commlib's cache and config folders, and check that only this user can change the files in them.

Files from these folders decide what a job runs. So commlib checks the whole path, as SSH does for its keys
(StrictModes): a user who owns a parent folder, or may write to it, can replace the folders below. The check walks from
the root by descriptors: it opens each folder relative to its parent, and files relative to the last folder. A rename
during the walk therefore cannot swap a checked folder for another.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # O_PATH: a home may be unreadable
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # never block on a pipe


class NotPrivateError(PermissionError):
    """Another user can change the folder or file."""


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return commlib's folder in the user's cache folder: in XDG_CACHE_HOME, else in ~/.cache. It need not exist."""
    return _user_folder(environment, "XDG_CACHE_HOME", ".cache")


def user_config(environment: Mapping[str, str] = os.environ) -> Path:
    """Return commlib's folder in the user's config folder: in XDG_CONFIG_HOME, else in ~/.config. It need not exist."""
    return _user_folder(environment, "XDG_CONFIG_HOME", ".config")


def _user_folder(environment: Mapping[str, str], variable: str, in_home: str) -> Path:
    given = environment.get(variable, "")
    if not os.path.isabs(given):
        home = os.path.expanduser("~")
        given = os.path.join("/" if home == "~" else home, in_home)  # "~": the container has no entry for this user
    return Path(given) / "commlib"


@contextmanager
def open_private(path: str | os.PathLike[str], *, create: bool = False) -> Iterator[int]:
    """Open a folder that only this user (and root) can change, and yield its descriptor, for use as `dir_fd`.

    create: create missing folders of the path, for this user only. Raises NotPrivateError that names the unsafe folder
    on the path and the reason, and OSError as `os.open` does.
    """
    here = os.open("/", _FOLDER)
    try:
        way = Path(os.path.realpath(path))  # a link is as safe as its target
        ours = {os.geteuid(), 0}
        above = ours | {os.fstat(here).st_uid}  # the owner of / (in containers not always root)
        for folder in (*reversed(way.parents), way):
            if folder.name:  # all but /, which is open
                below = _enter(folder.name, here, create)
                os.close(here)
                here = below
            _check(folder, here, ours if folder == way else above, may_be_shared=folder != way)
        yield here
    finally:
        os.close(here)


def read_private(name: str, folder: int) -> bytes:
    """Read a file of an opened folder. Raises NotPrivateError if another user can change it, and OSError."""
    descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotPrivateError(f"{name} is not a file")
        _check(Path(name), descriptor, {os.geteuid(), 0}, may_be_shared=False)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_private(name: str, folder: int, data: bytes) -> None:
    """Write a file into an opened folder atomically, readable by this user only. Raises OSError."""
    temporary = f"{name}.{os.getpid()}.{os.urandom(4).hex()}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _enter(name: str, folder: int, create: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another process was faster
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _check(path: Path, descriptor: int, trusted: set[int], *, may_be_shared: bool) -> None:
    """may_be_shared: accept a folder such as /tmp, where the sticky bit lets only owners rename their files."""
    status = os.fstat(descriptor)
    if status.st_uid not in trusted:
        raise NotPrivateError(f"{path} belongs to {_user(status.st_uid)}")
    if may_be_shared and status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        raise NotPrivateError(f"{path} may be written by everyone (chmod go-w {path})")
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid, descriptor):
        raise NotPrivateError(f"{path} may be written by its group (chmod go-w {path})")


def _is_own_group(gid: int, descriptor: int) -> bool:
    """Return whether a file's group has this user as its only member, as with umask 002 and per-user groups."""
    with suppress(OSError):  # the file system has no access lists
        if "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{descriptor}"):
            return False  # then the group bits cover other users as well
    return is_group_of_one(gid, os.geteuid())


@cache
def is_group_of_one(gid: int, uid: int) -> bool:
    """Return whether a group is one user's private group, with no other member."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return (user.pw_gid, user.pw_name) == (gid, group.gr_name) and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
