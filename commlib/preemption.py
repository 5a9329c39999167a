"""Preemption: on a signal, let all ranks save their state and leave at the same step.

Slurm sends a signal before the time limit, or before it reclaims the nodes (`sbatch --signal=USR1@120`). The signal may
reach only one rank, and reaches ranks at different points of the program. So the handler only records it, and the ranks
agree on it at the end of a step.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from commlib.config.settings import ranks_text
from commlib.errors import UsageError
from commlib.process.age import process_age
from commlib.world import world

if TYPE_CHECKING:
    from commlib.communicator import Communicator
    from commlib.ranks import Ranks

log = logging.getLogger("commlib")

TRY_AGAIN = 75
"""Exit code of a job that requests a restart: EX_TEMPFAIL of sysexits.h."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a job that was signalled to stop: a shell's exit code for a process killed by SIGTERM."""

# These signals end the job for good: it saves its state and does not restart.
_STOPS = (signal.SIGTERM, signal.SIGINT)

_ASKING_SLURM = 60.0  # seconds; timeout of scontrol


class Preemption:
    """Record signals until all ranks can obey them together.

    Before it is entered a signal ends the process, so enter it first, before slow imports.

    Args:
        signals: The signals to handle; SIGTERM and SIGINT end the job without a restart.
        every: Ranks synchronise in every `every`-th call of `requested`.
        ranks: The ranks that synchronise; a mesh means all its ranks; None: all.

    Raises:
        UsageError: Outside the main thread, where Python cannot set signal handlers.

    Examples:
        >>> with commlib.Preemption() as preemption:
        ...     for step in range(2):
        ...         if preemption.requested():  # on all ranks at the same step
        ...             preemption.leave()
    """

    def __init__(
        self, signals: Iterable[int] = (signal.SIGUSR1,), *, every: int = 1, ranks: Ranks | None = None
    ) -> None:
        self._signals = [signal.Signals(number) for number in signals]
        if not self._signals or every < 1:
            raise UsageError(f"Preemption: expected some signals and every >= 1, got {self._signals} and {every}")
        self._every, self.comm = every, None if ranks is None else _communicator_of(ranks)
        self._before: dict[int, Any] = {}
        self._received: list[signal.Signals] = []  # the signals that this rank received
        self._calls = 0
        self._is_agreed = self._stops = False
        self._began = time.monotonic()  # the first step has ended, once `requested` was called
        self._start_up: float | None = None  # seconds until then
        self._trained = 0.0  # seconds from then to the agreement

    def __repr__(self) -> str:
        signals = ", ".join(number.name for number in self._signals)
        return f"<Preemption on {signals}: {'requested' if self._is_agreed else 'not requested'}>"

    def __enter__(self) -> Self:
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._record_signal)
        except (ValueError, OSError) as error:
            self._restore_handlers()
            raise UsageError(f"Preemption: cannot handle {number.name} here: {error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()

    def requested(self) -> bool:
        """Return whether any rank was signalled to leave; the same on all ranks. Call it at the end of each step.

        Every `every`-th call is collective, until it has returned True.

        Examples:
            >>> with commlib.Preemption() as preemption:
            ...     preemption.requested()
            False
        """
        self._calls += 1
        if self._calls == 1:
            self._began, self._start_up = time.monotonic(), process_age()
        if self._is_agreed or self._calls % self._every:
            return self._is_agreed
        import numpy as np

        comm = self._ranks()
        counts = np.array([len(self._received), any(number in _STOPS for number in self._received)], np.int64)
        comm.all_reduce(counts, out=counts)
        if counts[0]:
            self._is_agreed, self._stops = True, bool(counts[1])
            self._trained = time.monotonic() - self._began
            self._log_signals(comm.all_gather_object(sorted({number.name for number in self._received})))
        return self._is_agreed

    @property
    def stops(self) -> bool:
        """Whether the job ends for good: a rank received SIGTERM or SIGINT. Valid once `requested` is True."""
        return self._stops

    def leave(self) -> NoReturn:
        """End the program once all ranks have called this, after saving their state. Collective.

        Under Slurm rank 0 requeues the job, unless it was signalled to stop. It warns if this run trained
        for less time than its start took, since further runs will do the same.

        Raises:
            SystemExit: With `TRY_AGAIN` (75), on which a shell loop can restart the job without Slurm; or with
                `STOPPED` (143) if the job was signalled to stop.
        """
        comm = self._ranks()
        if comm.rank == 0 and not self._stops and (warning := short_run_text(self._start_up, self._trained)):
            log.warning("%s", warning)
        comm.barrier()
        if comm.rank == 0 and not self._stops and (job := slurm_job()):
            requeue(job)
        comm.barrier()  # a launcher kills the other ranks when the first one exits with such a code
        raise SystemExit(STOPPED if self._stops else TRY_AGAIN)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def _restore_handlers(self) -> None:
        # A signalled process is about to leave. Launchers may forward a signal twice: the second must not kill it.
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, signal.SIG_IGN if self._is_agreed else before)

    def _ranks(self) -> Communicator:
        return world() if self.comm is None else self.comm

    def _log_signals(self, everyone: list[list[str]]) -> None:
        """Log, once for all ranks, the signals and the ranks that received them."""
        if self._ranks().rank:
            return
        to = {
            name: [rank for rank, theirs in enumerate(everyone) if name in theirs]
            for theirs in everyone
            for name in theirs
        }
        summary = "; ".join(f"{name} received by {ranks_text(ranks)}" for name, ranks in to.items())
        log.warning("preemption: %s: all ranks save their state and leave", summary)


def short_run_text(start_up: float | None, trained: float) -> str | None:
    """Return a warning if a run trained for less time than its start took, else None. Units: seconds.

    start_up: from the start of the process to the end of its first step; None if unknown. trained: from then to the
    interruption.
    """
    if start_up is None or trained >= start_up:
        return None
    return (
        f"preemption: this run trained for {trained:.1f} s after a start of {start_up:.1f} s (imports, compilation, "
        "loading, the first step): a restart costs more time than it gains. Let runs last longer (--time, or a "
        "partition or QOS that is interrupted less), send the signal later (--signal=USR1@SECONDS with fewer seconds), "
        "or start faster (commlib warm; checkpoints and Python on a fast file system)"
    )


def slurm_job(environment: Mapping[str, str] = os.environ) -> str:
    """Return this process's job id for scontrol, or "" outside Slurm. In a job array it names only this element."""
    array, element = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{element}" if array and element else environment.get("SLURM_JOB_ID", "")


def requeue(job: str) -> bool:
    """Requeue a Slurm job, which ends it here; return whether Slurm accepted, and log an error if not."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_SLURM)
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        log.error("preemption: the job is not requeued: %s failed (%s)", " ".join(command), why)
    return not why


def _communicator_of(ranks: Ranks) -> Communicator:
    from commlib.ranks import communicator_of  # imports numpy, and a signal before __enter__ ends the process

    return communicator_of(ranks, "Preemption", whole=True)
