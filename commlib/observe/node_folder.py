"""Node folder: where the ranks of a running job on one host leave files for each other and for commands.

    /dev/shm/commlib-job-TOKEN-HOST/
        rank-3.json     a rank: its process, and where the job's folder of hangs is
        now-1/          a request for dumps
        errors/         errors of ranks that fail

It is in memory, so a look costs microseconds, and nothing is left in the user's folders. The last rank removes it; if a
job is killed, the next one removes it. Without /dev/shm there is none, and commands do not find the job.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "commlib-job-"
_STARTING = 60.0  # seconds in which a folder may have no ranks yet


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank of a running job. started: when its process started, in ticks since the boot. hangs: the job's folder."""

    token: str
    rank: int
    size: int
    process: int
    started: int
    hangs: str
    is_alone: bool  # all ranks of the job are on this host

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self.started == start_of(self.process) and state_of(self.process) not in ("Z", "X", "")


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The folder of one job on this host. Its methods raise OSError."""

    path: Path

    @classmethod
    def of(cls, token: str, parent: Path | None = None) -> NodeFolder:
        """Return the folder of a job on this host."""
        return cls((parent or SHARED_MEMORY) / f"{_PREFIX}{token}-{socket.gethostname()}")

    @property
    def token(self) -> str:
        """The job's token."""
        return self.path.name.removeprefix(_PREFIX).partition("-")[0]

    def join(self, record: RankRecord) -> None:
        """Add a rank of this user."""
        self.path.mkdir(0o700, exist_ok=True)
        if self.path.stat(follow_symlinks=False).st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to {owner_of(self.path)}")
        new = self.path / f".rank-{record.rank}"
        new.write_text(json.dumps(asdict(record)))
        os.replace(new, self.path / f"rank-{record.rank}.json")

    def leave(self, rank: int) -> None:
        """Remove a rank, and the folder with the last one."""
        with suppress(OSError):
            (self.path / f"rank-{rank}.json").unlink()
            if not any(self.path.glob("rank-*.json")):
                shutil.rmtree(self.path)

    def ranks(self) -> list[RankRecord]:
        """Return the ranks on this host that have joined, whether they still run or not."""
        records = []
        for path in self.path.glob("rank-*.json"):
            with suppress(OSError, ValueError, TypeError):
                records.append(RankRecord(**json.loads(path.read_text())))
        return sorted(records, key=lambda record: record.rank)

    @property
    def is_running(self) -> bool:
        """Whether one of its ranks still runs."""
        return any(record.is_alive for record in self.ranks())


def own_record(token: str, rank: int, size: int, hangs: str, *, is_alone: bool) -> RankRecord:
    """Return the record of this process."""
    return RankRecord(token, rank, size, os.getpid(), start_of(os.getpid()), hangs, is_alone)


def node_folders(parent: Path | None = None) -> Iterator[NodeFolder]:
    """Yield the folders of all jobs on this host, including jobs of other users."""
    end = f"-{socket.gethostname()}"
    for path in sorted((parent or SHARED_MEMORY).glob(f"{_PREFIX}*{end}")):
        if path.is_dir():
            yield NodeFolder(path)


def sweep(parent: Path | None = None) -> None:
    """Remove this user's folders of jobs that have ended, but not of jobs that are just starting."""
    for folder in node_folders(parent):
        with suppress(OSError):
            status = folder.path.stat()
            is_old = bool(folder.ranks()) or time.time() - status.st_mtime > _STARTING
            if status.st_uid == os.geteuid() and is_old and not folder.is_running:
                shutil.rmtree(folder.path)


def owner_of(path: Path) -> str:
    """Return the name of the user that a file belongs to."""
    uid = path.stat(follow_symlinks=False).st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def state_of(process: int) -> str:
    """Return the state letter of a process in /proc; "" if it has ended."""
    return (_fields(process) or [""])[0]


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if there is none."""
    return int((_fields(process) or ["", "0"])[1])


def start_of(process: int) -> int:
    """Return when a process started, in ticks since the boot; 0 if it has ended. Numbers of processes are reused."""
    fields = _fields(process)
    return int(fields[19]) if fields else 0


def _fields(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
