"""Hang watch: a thread of each rank that detects a job without progress and makes all ranks dump their state.

The first rank that has waited too long creates the hang's folder; all ranks poll for it every T/16, where T is the time
after which a hang is diagnosed. Every rank dumps its state, even if it is not waiting; the lowest responsive rank waits
up to T/2 for dumps and prints the diagnosis, so it appears within 2T. The dump of a rank that cannot write is missing;
other ranks on its host report the state of its process. The ranks share only this folder: dumps need one anyway, and
any other means of communication may be the cause of the hang.
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
"""Most hangs that are diagnosed in a job: a slow job may seem to hang in each of its evaluations."""

# In units of T, the time after which a hang is diagnosed: the interval of polls, and the longest wait for dumps.
_LOOK, _GATHER = 1 / 16, 1 / 2
_LEAST = 0.05  # seconds between two polls


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process. namespace: its PID namespace; in another namespace the number means another process."""

    host: str
    namespace: int
    process: int

    @classmethod
    def own(cls) -> RankProcess:
        """Return this process."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            namespace = 0
        return cls(socket.gethostname(), namespace, os.getpid())

    def state(self) -> str:
        """Return the state letter of the process in /proc, "" if it is gone."""
        try:
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class HangJob:
    """The job as all ranks see it. token: unique to the job. folder: of all hangs. after: T, in seconds."""

    rank: int
    token: str
    folder: str
    after: float
    processes: Sequence[RankProcess]


@dataclass(frozen=True, slots=True)
class Answers:
    """A rank's answers at its start: its process, and the absolute path of its hang folder."""

    process: RankProcess
    folder: str

    @classmethod
    def of(cls, config: Config) -> Answers:
        """Return the answers of this process."""
        try:
            return cls(RankProcess.own(), os.path.abspath(config.hang_folder))
        except OSError:  # the working directory is gone
            return cls(RankProcess.own(), config.hang_folder)


def watch_for_hangs(runtime: Runtime, rank: int, answers: Sequence[Answers]) -> None:
    """Start the hang watch, if the settings enable it. answers: of each rank; rank 0's folder counts."""
    after, timeout = runtime.config.hang_after, runtime.config.timeout
    if after and len(answers) > 1:
        after = min(after, timeout / 2) if timeout else after
        job = HangJob(rank, runtime.token, answers[0].folder, after, [each.process for each in answers])
        runtime.hang_watch = watch = HangWatch(runtime, job)
        watch.start()


class HangWatch:
    """The hang watch thread of one rank."""

    def __init__(self, runtime: Runtime, job: HangJob) -> None:
        self._runtime, self._job = runtime, job
        self._dumps = 0  # the number of hangs that this rank has dumped
        self._dumped_waits: set[float] = set()  # start times of the waits in its last dump
        self._has_ended = False  # True once one of these waits has ended
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-hang-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join(1.0)

    def _loop(self) -> None:
        try:
            while not self._closing.wait(max(_LEAST, self._job.after * _LOOK)) and self._dumps < MOST:
                self._poll()
        except Exception as error:  # a failure here must not end the job
            log.warning(
                "hang diagnosis is off on rank %d: %s: %s (COMMLIB_HANG_FOLDER is %s)",
                self._job.rank,
                type(error).__name__,
                error,
                self._job.folder,
            )

    def _poll(self) -> None:
        folder = self._folder(self._dumps + 1)
        if self._dumped_waits and not self._has_ended:
            self._check_end()
        if folder.exists():
            self._dump_and_diagnose(folder, set())
        elif self._may_dump() and (stuck := hang_state.find_stuck(self._runtime, self._job.after) - self._dumped_waits):
            folder.create()
            self._dump_and_diagnose(folder, stuck)

    def _may_dump(self) -> bool:
        """Return whether the last hang has ended; until then, further long waits are consequences of it."""
        return not self._dumps or self._folder(self._dumps).has_ended

    def _folder(self, number: int) -> HangFolder:
        return HangFolder.of(self._job.folder, self._job.token, number)

    def _check_end(self) -> None:
        """Log once if the hang of the last dump has ended."""
        if self._dumped_waits <= hang_state.find_wait_starts(self._runtime):
            return
        self._has_ended = True
        if self._folder(self._dumps).end():
            log.warning("rank %d continues: hang %d has ended", self._job.rank, self._dumps)

    # One hang

    def _dump_and_diagnose(self, folder: HangFolder, stuck: set[float]) -> None:
        self._dumps += 1
        dump = self._dump()
        self._dumped_waits, self._has_ended = stuck | hang_state.find_wait_starts(self._runtime), False
        folder.write(dump)
        if self._gather(folder) and not folder.is_diagnosed:
            diagnosis = str(diagnose(folder.read()))
            if folder.claim(diagnosis):
                last = "; later hangs of this job are not diagnosed" if self._dumps == MOST else ""
                log.warning("%s\ndumps of the ranks: commlib trace hang %s%s", diagnosis, folder.path, last)

    def _dump(self) -> Dump:
        runtime, job = self._runtime, self._job
        own = job.processes[job.rank]
        return Dump(
            hang=self._dumps,
            rank=job.rank,
            size=len(job.processes),
            host=own.host,
            process=own.process,
            time=time.time(),
            after=job.after,
            waits=tuple(hang_state.waits(runtime)),
            groups=hang_state.group_states(runtime),
            named=hang_state.list_named(runtime),
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
        """Wait for the dumps of all ranks that can write; return whether this rank is the lowest of them."""
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
