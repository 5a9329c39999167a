"""Preemption: signals that ask training to save its state and to leave, and that all ranks obey at the same step.

Slurm sends a signal before the time limit, or before it takes the nodes away (`sbatch --signal=USR1@120`). It may come
to one rank only, and never at the same point of the program on two. So a handler only takes note of it, and ranks ask
each other at the end of a step.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from commlib.config.settings import ranks_text
from commlib.errors import UsageError
from commlib.world import world

if TYPE_CHECKING:
    from commlib.communicator import Communicator

log = logging.getLogger("commlib")

TRY_AGAIN = 75
"""Exit code of a job that wants to be started again: EX_TEMPFAIL of sysexits.h."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a job that was asked to stop, as a shell says it of a process that SIGTERM has ended."""

# Who sends these wants the job to end: it saves its state, and does not come back.
_STOPS = (signal.SIGTERM, signal.SIGINT)

_ASKING_SLURM = 60.0  # seconds that scontrol gets


class Preemption:
    """Take note of signals until all ranks can obey: `with commlib.Preemption() as preemption:` around training.

    signals: which ones; SIGUSR1 by default. SIGTERM and SIGINT may be among them: they ask for an end without a return.
    every: ranks ask each other in every so-manieth call of `requested`.
    comm: the ranks that ask each other; by default all.

    Until it is entered a signal ends the process, so enter it first, before imports that take long. Raises UsageError
    outside the main thread, where Python sets no handlers.
    """

    def __init__(
        self, signals: Iterable[int] = (signal.SIGUSR1,), *, every: int = 1, comm: Communicator | None = None
    ) -> None:
        self._signals = [signal.Signals(number) for number in signals]
        if not self._signals or every < 1:
            raise UsageError(f"Preemption: expected some signals and every >= 1, got {self._signals} and {every}")
        self._every, self.comm = every, comm
        self._before: dict[int, Any] = {}
        self._came: list[signal.Signals] = []  # to this rank
        self._calls = 0
        self._is_agreed = self._stops = False

    def __enter__(self) -> Self:
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        except (ValueError, OSError) as error:
            self._put_back()
            raise UsageError(f"Preemption: cannot handle {number.name} here: {error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def requested(self) -> bool:
        """Return whether any rank was asked to leave; the same on all ranks. Call it at the end of each step.

        Collective in every `every`-th call until it returns True, and from then on not at all.
        """
        self._calls += 1
        if self._is_agreed or self._calls % self._every:
            return self._is_agreed
        import numpy as np

        comm = self._ranks()
        counts = np.array([len(self._came), any(number in _STOPS for number in self._came)], np.int64)
        comm.all_reduce(counts, out=counts)
        if counts[0]:
            self._is_agreed, self._stops = True, bool(counts[1])
            self._tell(comm.all_gather_object(sorted({number.name for number in self._came})))
        return self._is_agreed

    @property
    def stops(self) -> bool:
        """Whether the job is to end for good: a rank has got SIGTERM or SIGINT. Known when `requested` is True."""
        return self._stops

    def leave(self) -> NoReturn:
        """End the program, once all ranks have come here: their state is saved. Collective.

        Under Slurm rank 0 asks for the job to be put into the queue again, unless it was asked to stop. Raises
        SystemExit with `TRY_AGAIN` (75), so that a loop in a shell can start the job again where there is no Slurm; or
        with `STOPPED` (143).
        """
        comm = self._ranks()
        comm.barrier()
        if comm.rank == 0 and not self._stops and (job := slurm_job()):
            requeue(job)
        comm.barrier()  # a launcher ends the others when the first one leaves with such a code
        raise SystemExit(STOPPED if self._stops else TRY_AGAIN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(signal.Signals(number))

    def _put_back(self) -> None:
        # Who was asked to leave is about to, and launchers may pass a signal on twice: it must not end the process.
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, signal.SIG_IGN if self._is_agreed else before)

    def _ranks(self) -> Communicator:
        return world() if self.comm is None else self.comm

    def _tell(self, everyone: list[list[str]]) -> None:
        """Log, once for all ranks, which signals came where."""
        if self._ranks().rank:
            return
        to = {
            name: [rank for rank, theirs in enumerate(everyone) if name in theirs]
            for theirs in everyone
            for name in theirs
        }
        said = "; ".join(f"{name} came to {ranks_text(ranks)}" for name, ranks in to.items())
        log.warning("preemption: %s: all ranks save their state and leave", said)


def slurm_job(environment: Mapping[str, str] = os.environ) -> str:
    """Return what scontrol calls the job of this process, or "" outside Slurm. Of an array it is this element alone."""
    array, element = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{element}" if array and element else environment.get("SLURM_JOB_ID", "")


def requeue(job: str) -> bool:
    """Put a job of Slurm into its queue again, which ends it here; return whether Slurm takes it, and log if not."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_SLURM)
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        log.error("preemption: the job does not come back by itself: %s failed (%s)", " ".join(command), why)
    return not why
