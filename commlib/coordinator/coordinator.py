"""Coordinator: run the named operations of one group, which ranks may submit in any order.

A cycle is one small exchange (see `Cycle`), followed by the operations that it agreed on. A rank takes part in cycles
while it waits for an operation: nothing can be agreed on without it. Cycles have no clock, so an idle job runs none.

Every rank runs the same cycles in the same order on a private group of the coordinator. `Driver` decides when and in
which thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

from commlib.coordinator.compressed_buckets import CompressedBuckets
from commlib.coordinator.cycle import Cycle
from commlib.coordinator.device_operands import Staging
from commlib.coordinator.driver import Driver
from commlib.coordinator.error_text import ErrorText, GroupFailure
from commlib.coordinator.execution import Execution
from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.negotiation import (
    RESTART,
    Failure,
    JoinEnd,
    Launch,
    Negotiation,
    RequestList,
    Response,
    Restart,
)
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.op_table import OpTable
from commlib.coordinator.pending_op import PendingOp, StallInspector
from commlib.coordinator.records import Records
from commlib.errors import CommlibError, ShutdownError, StallError, UsageError
from commlib.process import forks

log = logging.getLogger("commlib")


class Coordinator:
    """Runs one rank's side. `comm` is a private group; `members` lists the names of its ranks.

    negotiation: decides what is agreed on (default: a new one, for as many names as the settings allow).
    """

    def __init__(self, comm: Any, members: Sequence[int], *, negotiation: Negotiation | None = None) -> None:
        self.comm = comm
        self.members = tuple(members)
        self.failed: dict[PendingOp, None] = {}
        """Failed operations whose error nobody has retrieved."""
        self.requests: dict[Hashable, OpRequest] = {}
        """Cached requests by their arguments, because checking and comparing a new request takes longer."""
        self.cycles = 0
        """Number of exchanges."""
        self.joins = 0
        """How many times all ranks have joined."""
        self.restarts = 0
        """How many times all ranks have restarted."""
        self.serials: dict[str, int] = {}
        """Number of gradient sets made under each name: see `commlib.named_gradients.named_buckets`."""
        config = comm.config
        self._records = Records(comm.runtime.recording, comm.name)
        self._stalls = StallInspector(config.stall_warning, config.timeout)
        if negotiation is None:
            negotiation = Negotiation(comm.rank, self.members, capacity=config.known_names)
        self._negotiation = negotiation
        self._cycle = Cycle(comm)
        self._execution = Execution(comm, self.members, config.fusion_mib << 20)
        self._wording = ErrorText(comm, self.members, self._negotiation)
        self._lock = threading.Lock()  # for the negotiation and the operations
        self._ops = OpTable(comm.name, self._negotiation)
        self._failure: GroupFailure | None = None
        self._driver = Driver(
            self._lock,
            self._ops.pending,
            self._negotiation,
            comm.group,
            run=self._run_cycle,
            fail=self._fail,
        )
        self.drive, self.wake = self._driver.drive, self._driver.wake
        comm.group.speak_for(self._explain)

    @property
    def buckets(self) -> CompressedBuckets:
        """The buckets of compressed gradients."""
        return self._execution.buckets

    def take_devices(self) -> None:
        """Accept device arrays in operations, as `OnDevice`. Not collective."""
        if self._execution.staging is None:
            self._execution.staging = Staging(self.comm.group)

    def __repr__(self) -> str:
        return f"<Coordinator of {self.comm.name}: {len(self._ops.pending)} pending, {self.cycles} cycles>"

    def next_name(self, verb: str) -> str:
        """Return a name for this rank's next operation of a verb without a user-given name: see `UnnamedOps`."""
        return self._ops.unnamed.next_name(verb)

    def submit(
        self,
        request: OpRequest,
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        extra: Any = None,
        *,
        blocking: bool = False,
    ) -> PendingOp:
        """Submit an operation and return at once. Raises UsageError if an operation of this name is already pending.

        blocking: the caller is about to wait for it, so no thread needs to be woken.
        """
        pending = PendingOp(self, request, inputs, outputs, extra)
        with self._lock:
            if self._driver.closed:
                forks.check(str(request))
                raise ShutdownError(f"{request}: commlib has been shut down")
            if self._failure is not None:
                raise self._wording.after(self._failure, request)
            if "join" in self._ops.pending and request.verb not in ("join", RESTART.verb):
                raise UsageError(
                    f"{request}: this rank has joined and cannot submit operations until all ranks have joined"
                )
            self._ops.add(pending)
            if self._records.recording.recorder is not None:
                self._records.queue(pending)
            if self._driver.napping or not blocking:
                self._driver.notify()
        return pending

    def restart(self) -> PendingOp:
        """Give up all operations that are not agreed on, on all ranks. It completes when all ranks have called it.

        Until then, submitted operations end with a MismatchError, unless all ranks submit them in the same cycle. Joins
        are cancelled, too. Raises as `submit` does.
        """
        return self.submit(RESTART)

    def waiting(self) -> list[tuple[str, str, float]]:
        """Return the pending operations, read without the lock: see `OpTable.waiting`."""
        return self._ops.waiting()

    def launched(self) -> list[tuple[str, str, bool]]:
        """Return the last agreed operations, oldest first, without the lock: see `OpTable.launched`."""
        return self._ops.launched()

    # One cycle

    def _run_cycle(self) -> None:
        self._driver.midway = True
        with self._lock:
            overdue = self._stalls.overdue(self._ops.pending)
            announcement = self._negotiation.announce()
        self.cycles += 1
        if self._records.recording.recorder is not None:
            self._records.mark_cycle()

        def in_full() -> RequestList:
            with self._lock:
                expired = tuple(name for name, too_late in overdue.items() if too_late)
                return RequestList(announcement.requests, expired, tuple(self._negotiation.waiting))

        bits, everyone = self._cycle.run(announcement, bool(overdue), in_full)
        with self._lock:
            responses = self._negotiation.agree(bits, everyone)
            jobs = self._take(responses)
            for name in overdue:
                if name in self._ops.pending:
                    self._warn(self._ops.pending[name], everyone)
        self._driver.pace(has_agreed=bool(responses))
        if jobs:
            self._run(jobs)
        self._driver.midway = False  # at once: a rank that is interrupted from here on has done its part

    def _run(self, jobs: Sequence[LaunchedOp]) -> None:
        records = self._records.run(jobs)
        before = time.perf_counter()

        def finish(job: LaunchedOp, value: Any, error: BaseException | None) -> None:
            nonlocal before
            if job.pending is None and (record := records.get(job.launch.request.name)) is not None:
                record.end(error)
            if job.pending is not None:
                # Several operations that ran as one end together; the first gets the entire time.
                now = time.perf_counter()
                job.pending.seconds, before = now - before, now
                job.pending.finish(
                    value, None if error is None else self._wording.refuse_one(job.pending.request, error)
                )

        self._execution.run(jobs, finish)
        self._ops.running = []

    def _take(self, responses: Sequence[Response]) -> list[LaunchedOp]:
        """Fail the operations that cannot run; return those that can."""
        ops = self._ops
        ops.running = jobs = []  # first added here, then removed from pending: always in at least one of the two
        find = ops.pending.get
        for response in responses:
            name = response.request.name
            pending = find(name)
            if type(response) is Launch:
                jobs.append(LaunchedOp(response, pending))
                ops.flight.append(response.request)
            elif isinstance(response, Restart):
                self._restart(response)
                continue
            elif pending is None:
                continue
            elif isinstance(response, JoinEnd):
                ops.unnamed.restart_count()
                self.joins += 1
                pending.finish(response.last)
            else:
                assert isinstance(response, Failure)
                pending.finish(error=self._wording.refused(response))
            if pending is not None:
                del ops.pending[name]
        for later in ops.unnamed.due(ops.pending):
            ops.add(later)
        if jobs:
            self._wording.last, self._wording.when = jobs[-1].launch.request, time.monotonic()
        return jobs

    def _restart(self, restart: Restart) -> None:
        """Give up what is pending, except this rank's restart if the other ranks have not restarted yet."""
        own = self._ops.pending.get(restart.request.name)
        for pending in self._ops.clear():
            if pending is not own:
                pending.finish(error=self._wording.restarted(pending.request, restart.by))
        if own is not None and not restart.complete:
            self._ops.pending[restart.request.name] = own
        elif own is not None:
            self._ops.unnamed.restart_count()
            self.restarts += 1
            self.failed.clear()  # a restart makes these errors obsolete
            own.finish()

    def _warn(self, pending: PendingOp, everyone: Sequence[RequestList]) -> None:
        reason = self._negotiation.explain(pending.request.name, everyone)
        if reason and not pending.warned:
            pending.warned = True
            waited = time.monotonic() - pending.since
            reason += self.comm.runtime.forecast(waited)
            log.warning("%s", self._wording.overdue(pending.request, waited, reason))

    # Long waits and failures

    def _fail(self, error: BaseException) -> None:
        """End all pending operations, because this rank is out of step with the others, and notify the other ranks."""
        with self._lock:
            running, waiting = self._ops.requests()
            if self._failure is None:
                self._failure = self._wording.ended(error, running, waiting)
            failure, left = self._failure, self._ops.clear(running=True)
        if not isinstance(error, ShutdownError):
            self.comm.group.leave(self._wording.describe_failure(error, [*running, *waiting]))
        for pending in left:
            pending.fail(self._wording.after(failure, pending.request))

    def _explain(self, waited: float, late: list[int]) -> str:
        """Return the warning about a long wait within a cycle."""
        with self._lock:
            running, waiting = self._ops.requests()
        return self._wording.long_wait(waited, late, running, waiting)

    # Shutdown

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or, after `timeout` s, the first unfinished operation."""
        deadline = time.monotonic() + timeout
        for pending in self._ops.unfinished():
            try:
                pending.wait(max(0.0, deadline - time.monotonic()))
            except StallError:
                if not pending.done():
                    return f"unfinished {pending.request}"
            except CommlibError:
                pending.seen = False  # the submitter has not seen the error
                self.failed[pending] = None
        return ""

    def abandon(self) -> None:
        """Disable this object in a forked child. Threads that the child lacks may hold its copies of the locks."""
        self._lock = threading.Lock()
        self._driver.abandon(self._lock)
        self._ops.pending.clear()

    def close_group(self) -> None:
        """Close, and release the group. Collective. Nothing may be pending."""
        self.close()
        with self._driver.driving:
            if self._execution.staging is not None:
                self._execution.staging.close()
            self.comm.close()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        self._driver.join(timeout)

    def unseen_failure(self) -> str:
        """Return the first failed operation whose error nobody has retrieved, or ""."""
        for pending in list(self.failed):
            if (error := pending.unseen_error) is not None:
                return f"failed {pending.request} ({type(error).__name__}: {error})"
        return ""

    def close(self) -> None:
        """Refuse new operations; operations that have not run end with ShutdownError. Never blocks."""
        with self._lock:
            self._driver.close()
            left = self._ops.clear()  # the running thread gives up the running operations
        for pending in left:
            begin = self._wording.begin([pending.request])
            pending.fail(ShutdownError(f"{begin}: commlib was shut down before all ranks had submitted it"))
