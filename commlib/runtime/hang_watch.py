"""Hang watch: a thread of each rank that makes all ranks dump their state, in a job without progress or on request.

The first rank that has waited too long creates the hang's folder; all ranks poll for it every T/16, where T is the time
after which a hang is diagnosed. Every rank dumps its state, even if it is not waiting; the lowest responsive rank waits
up to T/2 for dumps and prints the diagnosis, so it appears within 2T. The dump of a rank that cannot write is missing;
other ranks on its host report the state of its process. The ranks share only this folder: dumps need one anyway, and
any other means of communication may be the cause of the hang.

A request (`commlib trace hang --now`) is a folder too: see `commlib.observe.dump_request`. All ranks look for it in
memory of their host every second, and one rank of each host looks in the shared folder.
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
from commlib.observe.dump_request import numbers_in, request_path
from commlib.observe.hang_folder import HangFolder
from commlib.observe.node_folder import NodeFolder, own_record, state_of, sweep
from commlib.runtime import hang_state
from commlib.runtime.process import Runtime
from commlib.runtime.stacks import all_threads

log = logging.getLogger("commlib")

MOST = 8
"""Most hangs that are diagnosed in a job: a slow job may seem to hang in each of its evaluations."""

# In units of T, the time after which a hang is diagnosed: the interval of polls, and the longest wait for dumps.
_LOOK, _GATHER = 1 / 16, 1 / 2
_LEAST = 0.05  # seconds between two polls

# Seconds between two looks for requests: on this host, and for each host of the job in the shared folder, whose server
# serves all hosts.
_REQUESTS, _REQUESTS_PER_HOST = 1.0, 0.02


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
        """Return the state letter of the process in /proc, "" if it has ended."""
        return state_of(self.process)


@dataclass(frozen=True, slots=True)
class HangJob:
    """The job as all ranks see it.

    token: unique to the job. folder: of all hangs. after: T, in seconds; 0: dump on request only.
    """

    rank: int
    token: str
    folder: str
    after: float
    processes: Sequence[RankProcess]

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len({(process.host, process.namespace) for process in self.processes})

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this rank's host, itself included."""
        own = self.processes[self.rank]
        return [
            rank
            for rank, other in enumerate(self.processes)
            if (other.host, other.namespace) == (own.host, own.namespace)
        ]


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
        except OSError:  # the working directory was removed
            return cls(RankProcess.own(), config.hang_folder)


def watch_for_hangs(runtime: Runtime, rank: int, answers: Sequence[Answers]) -> None:
    """Start the hang watch of a job of several ranks. answers: of each rank; rank 0's folder counts."""
    after, timeout = runtime.config.hang_after, runtime.config.timeout
    if len(answers) > 1:
        after = min(after, timeout / 2) if timeout else after
        job = HangJob(rank, runtime.token, answers[0].folder, after, [each.process for each in answers])
        runtime.hang_watch = watch = HangWatch(runtime, job)
        watch.start()


def join_node_folder(job: HangJob) -> NodeFolder | None:
    """Make this rank known to commands on its host; return the folder, or None without one."""
    folder = NodeFolder.of(job.token)
    try:
        sweep()
        folder.join(own_record(job.token, job.rank, len(job.processes), job.folder, is_alone=job.hosts == 1))
    except OSError as error:
        log.info("commands on this host do not find rank %d: %s", job.rank, error)
        return None
    return folder


class HangWatch:
    """The hang watch thread of one rank."""

    def __init__(self, runtime: Runtime, job: HangJob) -> None:
        self._runtime, self._job = runtime, job
        self._dumps = 0  # the number of hangs that this rank has dumped
        self._dumped_waits: set[float] = set()  # start times of the waits in its last dump
        self._has_ended = False  # True once one of these waits has ended
        self._answered = 0  # the number of the last request that this rank has answered
        self._next_poll = self._next_look = 0.0  # `time.monotonic` of the next looks in the shared folder
        self.node = join_node_folder(job)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-hang-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join(1.0)
        if self.node is not None:
            self.node.leave(self._job.rank)

    @property
    def errors(self) -> Path | None:
        """The folder in which failing ranks leave their errors: of the host, if all ranks are on it."""
        if self._job.hosts > 1:
            return self._job_folder / "errors"
        return None if self.node is None else self.node.path / "errors"

    @property
    def hangs(self) -> Path:
        """The folder of the job's hangs."""
        return self._job_folder

    def forecast(self, waited: float) -> str:
        """Return the end of a warning about a long wait: when the diagnosis is due, and how to get it now."""
        job = self._job
        name = job.token
        if job.hosts > 1 or self.node is None:
            name = str(self._job_folder)
            try:
                self._job_folder.mkdir(parents=True, exist_ok=True)  # by which other hosts find the job
            except OSError:
                return ""
        now = f"commlib trace hang --now {name}"
        if not job.after:
            return f"; why: {now}"
        if (left := job.after - waited) > 0:
            return f"; the diagnosis comes in {max(left, 1.0):.0f} s (COMMLIB_HANG_AFTER), or at once: {now}"
        return f"; the diagnosis at once: {now}"

    @property
    def _job_folder(self) -> Path:
        return Path(self._job.folder) / f"job-{self._job.token}"

    def _loop(self) -> None:
        try:
            interval = max(_LEAST, self._job.after * _LOOK)
            while not self._closing.wait(min(interval, _REQUESTS) if self._job.after else _REQUESTS):
                self._answer_requests()
                if self._job.after and self._dumps < MOST and time.monotonic() >= self._next_poll:
                    self._next_poll = time.monotonic() + 0.9 * interval
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

    # Requests

    def _answer_requests(self) -> None:
        """Dump this rank's state if a command has requested it since the last check."""
        numbers = numbers_in(self.node.path) if self.node is not None else []
        job = self._job
        if job.hosts > 1 and job.rank == job.neighbours[0] and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + max(_REQUESTS, _REQUESTS_PER_HOST * job.hosts)
            shared = numbers_in(self._job_folder)
            if self.node is not None:
                for number in set(shared) - set(numbers):
                    request_path(self.node.path, number).mkdir(exist_ok=True)  # for the neighbours
            numbers = sorted({*numbers, *shared})
        if not numbers or numbers[-1] <= self._answered:
            return
        self._answered = numbers[-1]
        place = self.node.path if self.node is not None and job.hosts == 1 else self._job_folder
        folder = HangFolder(request_path(place, self._answered))
        try:
            folder.create()
            folder.write(self._dump(0))
        except OSError as error:
            log.warning("rank %d cannot write its state to %s: %s", job.rank, folder.path, error)

    # One hang

    def _dump_and_diagnose(self, folder: HangFolder, stuck: set[float]) -> None:
        self._dumps += 1
        dump = self._dump(self._dumps)
        self._dumped_waits, self._has_ended = stuck | hang_state.find_wait_starts(self._runtime), False
        folder.write(dump)
        if self._gather(folder) and not folder.is_diagnosed:
            diagnosis = str(diagnose(folder.read()))
            if folder.claim(diagnosis):
                last = "; later hangs of this job are not diagnosed" if self._dumps == MOST else ""
                log.warning("%s\ndumps of the ranks: commlib trace hang %s%s", diagnosis, folder.path, last)

    def _dump(self, hang: int) -> Dump:
        runtime, job = self._runtime, self._job
        own = job.processes[job.rank]
        return Dump(
            hang=hang,
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
        others = [(rank, self._job.processes[rank]) for rank in self._job.neighbours if rank != self._job.rank]
        return tuple(ProcessState(rank, other.host, other.process, other.state()) for rank, other in others)

    def _gather(self, folder: HangFolder) -> bool:
        """Wait for the dumps of all ranks that can write; return whether this rank is the lowest of them."""
        rank, size = self._job.rank, len(self._job.processes)
        deadline = time.monotonic() + self._job.after * (_GATHER if rank == 0 else _GATHER + _LOOK)
        while not self._closing.wait(max(_LEAST, min(0.2, self._job.after * _LOOK))) and time.monotonic() < deadline:
            self._answer_requests()
            if folder.is_diagnosed:
                return False
            if len(folder.ranks()) == size:
                return rank == 0
            if rank == 0 and self._only_ended_are_missing(folder.ranks()):
                break
        return not self._closing.is_set() and rank == min(folder.ranks())

    def _only_ended_are_missing(self, written: set[int]) -> bool:
        ended = {state.rank for state in self._neighbours() if state.state in ("", "T", "t", "Z", "X")}
        return ended >= set(range(len(self._job.processes))) - written
