"""Hang watch: a thread of each rank that finds out when the job makes no progress, and lets all ranks write why.

The first rank that has waited too long makes the hang's folder. All others see it within a few looks, also those that
wait for nothing: their threads are elsewhere, and this one is not. Whoever cannot write is missing, and that is told by
its neighbours on the host. The lowest rank that has written reads what all have, and prints one diagnosis. Nothing but
a folder is shared: the dumps need one anyway, and whatever else ranks could tell each other by may be what hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commlib.config.settings import Config
from commlib.observe.diagnosis import diagnose
from commlib.observe.dump import Dump, ProcessState
from commlib.observe.hang_folder import HangFolder
from commlib.runtime import hang_state
from commlib.runtime.process import Runtime
from commlib.runtime.stacks import all_threads

log = logging.getLogger("commlib")

MOST = 8
"""Hangs of a job that are written about: a slow job that is none may seem to hang in each of its evaluations."""

# All in parts of the time after which a hang is one: how often a thread looks, and how long dumps are waited for.
_LOOK, _GATHER = 1 / 16, 1 / 2
_LEAST = 0.05  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Process:
    """Where a rank lives. namespace: of process numbers; in another one the number means another process."""

    host: str
    namespace: int
    process: int

    @classmethod
    def own(cls) -> Process:
        """Return that of this process."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            namespace = 0
        return cls(socket.gethostname(), namespace, os.getpid())

    def state(self) -> str:
        """Return its letter in /proc, "" if it is gone."""
        try:
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks know of the job. token: no other job has it. folder: of all hangs. after: seconds."""

    rank: int
    token: str
    folder: str
    after: float
    processes: Sequence[Process]


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells the others of itself as it joins. folder: where hangs are written about, as it sees it."""

    process: Process
    folder: str

    @classmethod
    def of(cls, config: Config) -> Told:
        """Return that of this process."""
        try:
            return cls(Process.own(), os.path.abspath(config.hang_folder))
        except OSError:  # the working directory is gone
            return cls(Process.own(), config.hang_folder)


def watch_for_hangs(runtime: Runtime, rank: int, told: Sequence[Told]) -> None:
    """Watch from now on, if that is wanted. told: by each rank; the folder is that of rank 0."""
    after, timeout = runtime.config.hang_after, runtime.config.timeout
    if after and len(told) > 1:
        after = min(after, timeout / 2) if timeout else after
        job = Job(rank, runtime.token, told[0].folder, after, [each.process for each in told])
        runtime.hang_watch = watch = HangWatch(runtime, job)
        watch.start()


class HangWatch:
    """The thread of one rank."""

    def __init__(self, runtime: Runtime, job: Job) -> None:
        self._runtime, self._job = runtime, job
        self._written = 0  # hangs that this rank has written about
        self._told: set[float] = set()  # when those waits began that it has written of last
        self._goes_on = False  # one of them has ended
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-hang-watch", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._closing.set()
        self._thread.join(1.0)

    def _loop(self) -> None:
        try:
            while not self._closing.wait(max(_LEAST, self._job.after * _LOOK)) and self._written < MOST:
                self._look()
        except Exception as error:  # whatever it is: the job must go on
            log.warning(
                "hangs are explained no more on rank %d: %s: %s (COMMLIB_HANG_FOLDER is %s)",
                self._job.rank,
                type(error).__name__,
                error,
                self._job.folder,
            )

    def _look(self) -> None:
        folder = self._folder(self._written + 1)
        if self._told and not self._goes_on:
            self._look_for_end()
        if folder.exists():
            self._explain(folder, set())
        elif self._may_call() and (stuck := hang_state.stuck(self._runtime, self._job.after) - self._told):
            folder.create()
            self._explain(folder, stuck)

    def _may_call(self) -> bool:
        """Return whether the last hang has ended: until then, whoever comes to wait too long does so because of it."""
        return not self._written or self._folder(self._written).has_ended

    def _folder(self, number: int) -> HangFolder:
        return HangFolder.of(self._job.folder, self._job.token, number)

    def _look_for_end(self) -> None:
        """Tell once if what was written of has come to an end."""
        if self._told <= hang_state.began(self._runtime):
            return
        self._goes_on = True
        if self._folder(self._written).end():
            log.warning("rank %d goes on: what is called hang %d has come to an end", self._job.rank, self._written)

    # One hang

    def _explain(self, folder: HangFolder, stuck: set[float]) -> None:
        self._written += 1
        dump = self._dump()
        self._told, self._goes_on = stuck | hang_state.began(self._runtime), False
        folder.write(dump)
        if self._gather(folder) and not folder.is_diagnosed:
            diagnosis = str(diagnose(folder.read()))
            if folder.claim(diagnosis):
                last = "; no other hang of this job is written about" if self._written == MOST else ""
                log.warning("%s\nwritten by each rank: commlib trace hang %s%s", diagnosis, folder.path, last)

    def _dump(self) -> Dump:
        runtime, job = self._runtime, self._job
        own = job.processes[job.rank]
        return Dump(
            hang=self._written,
            rank=job.rank,
            size=len(job.processes),
            host=own.host,
            process=own.process,
            time=time.time(),
            after=job.after,
            waits=tuple(hang_state.waits(runtime)),
            groups=hang_state.group_states(runtime),
            named=hang_state.named(runtime),
            threads=all_threads(besides=threading.get_ident()),
            neighbours=self._neighbours(),
        )

    def _neighbours(self) -> tuple[ProcessState, ...]:
        own = self._job.processes[self._job.rank]
        return tuple(
            ProcessState(rank, other.host, other.process, other.state())
            for rank, other in enumerate(self._job.processes)
            if rank != self._job.rank and (other.host, other.namespace) == (own.host, own.namespace)
        )

    def _gather(self, folder: HangFolder) -> bool:
        """Wait until all ranks have written that can; return whether this one is the lowest of them."""
        rank, size = self._job.rank, len(self._job.processes)
        deadline = time.monotonic() + self._job.after * (_GATHER if rank == 0 else _GATHER + _LOOK)
        while not self._closing.wait(max(_LEAST, min(0.2, self._job.after * _LOOK))) and time.monotonic() < deadline:
            if folder.is_diagnosed:
                return False
            if len(folder.ranks()) == size:
                return rank == 0
            if rank == 0 and self._only_ended_are_missing(folder.ranks()):
                break
        return not self._closing.is_set() and rank == min(folder.ranks())

    def _only_ended_are_missing(self, written: set[int]) -> bool:
        known = {state.rank for state in self._neighbours() if state.state in ("", "T", "t", "Z", "X")}
        return known >= set(range(len(self._job.processes))) - written
