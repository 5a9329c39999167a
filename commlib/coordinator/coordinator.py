"""Coordinator: run the named operations of one group, in whatever order ranks ask for them.

A cycle is one small exchange (see `Cycle`) and then the operations that it agreed on. A rank takes part
in a cycle while it waits for something: nothing can be agreed without it, and with nothing to wait for it need not
know. So no cycle is run by the clock, and an idle job does nothing at all.

Every rank runs the same cycles in the same order on a group of the coordinator's own. `Driver` says when, and in which
thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from commlib.coordinator.compressed_buckets import CompressedBuckets
from commlib.coordinator.cycle import Cycle
from commlib.coordinator.driver import Driver
from commlib.coordinator.execution import Execution
from commlib.coordinator.job import Job
from commlib.coordinator.negotiation import (
    RESTART,
    Failure,
    Joined,
    Launch,
    Negotiation,
    RequestList,
    Response,
    Restart,
)
from commlib.coordinator.on_device import Staging
from commlib.coordinator.patience import Patience
from commlib.coordinator.pending import Pending
from commlib.coordinator.records import Records
from commlib.coordinator.request import Request
from commlib.coordinator.unnamed import Unnamed
from commlib.coordinator.wording import Ended, Wording
from commlib.errors import CommlibError, ShutdownError, StallError, UsageError
from commlib.observe.flight import LAST
from commlib.process import forks
from commlib.runtime.recording import Recording

log = logging.getLogger("commlib")


class Coordinator:
    """Run one rank's side. `comm` is a group of its own; `members` are the names of its ranks.

    negotiation: decides what is agreed (default: one of its own, for as many names as the settings say).
    """

    def __init__(self, comm: Any, members: Sequence[int], *, negotiation: Negotiation | None = None) -> None:
        self.comm = comm
        self.members = tuple(members)
        self.failed: dict[Pending, None] = {}
        """Those that were never asked for since."""
        self.requests: dict[Hashable, Request] = {}
        """Requests that were made before, by what they are made of: to check and to compare them anew takes longer."""
        self.cycles = 0
        """How many exchanges there were."""
        self.joins = 0
        """How often all ranks had joined."""
        self.restarts = 0
        """How often all ranks had restarted."""
        self.serials: dict[str, int] = {}
        """How many sets of gradients were made under a name: see `commlib.named_gradients.by_name`."""
        config = comm.config
        self._recording: Recording = comm.runtime.recording
        self._records = Records(self._recording, comm.name)
        self._patience = Patience(config.stall_warning, config.timeout)
        if negotiation is None:
            negotiation = Negotiation(comm.rank, self.members, capacity=config.known_names)
        self._negotiation = negotiation
        self._cycle = Cycle(comm)
        self._execution = Execution(comm, self.members, config.fusion_mib << 20)
        self._wording = Wording(comm, self.members, self._negotiation)
        self._lock = threading.Lock()  # of the negotiation and what is pending
        self._pending: dict[str, Pending] = {}
        self._unnamed = Unnamed()
        self._running: list[Job] = []  # agreed on, not ended
        self._flight: deque[Request] = deque(maxlen=LAST)  # agreed on last
        self._ended: Ended | None = None
        self._driver = Driver(
            self._lock,
            self._pending,
            self._negotiation,
            comm.group,
            run=self._run_cycle,
            fail=self._fail,
        )
        self.drive, self.wake = self._driver.drive, self._driver.wake
        comm.group.speak_for(self._explain)

    @property
    def buckets(self) -> CompressedBuckets:
        """The buckets of gradients that are compressed."""
        return self._execution.buckets

    def take_devices(self) -> None:
        """Let operations have arrays of devices, as `OnDevice`. Not collective."""
        if self._execution.staging is None:
            self._execution.staging = Staging(self.comm.group)

    def __repr__(self) -> str:
        return f"<Coordinator of {self.comm.name}: {len(self._pending)} pending, {self.cycles} cycles>"

    def next_name(self, verb: str) -> str:
        """Return the name of this rank's next operation of a verb that the user gives none: see `Unnamed`."""
        return self._unnamed.next_name(verb)

    def submit(
        self,
        request: Request,
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        extra: Any = None,
        *,
        blocking: bool = False,
    ) -> Pending:
        """Ask for an operation and return at once. Raises UsageError if one of its name is pending here.

        blocking: the caller is about to wait for it, so no thread needs to be woken.
        """
        pending = Pending(self, request, inputs, outputs, extra)
        with self._lock:
            if self._driver.closed:
                forks.check(str(request))
                raise ShutdownError(f"{request}: commlib has been shut down")
            if self._ended is not None:
                raise self._wording.after(self._ended, request)
            if "join" in self._pending and request.verb not in ("join", RESTART.verb):
                raise UsageError(f"{request}: this rank has joined, and takes no further part until all have")
            if request.name in self._pending and self._unnamed.is_one(request.name):
                self._unnamed.put_off(pending)
            else:
                self._ask(pending)
            if self._recording.recorder is not None:
                self._records.queue(pending)
            if self._driver.napping or not blocking:
                self._driver.tell()
        return pending

    def restart(self) -> Pending:
        """Give up, on all ranks, what was asked for and not agreed on; done when all ranks have called this.

        Until then whatever a rank asks for ends with a MismatchError, unless all ask for it at the same time. Joins are
        given up, too. Raises as `submit` does.
        """
        return self.submit(RESTART)

    def waiting(self) -> list[tuple[str, str, float]]:
        """Return what is pending, for who looks on without the lock: names, texts and since when (`time.monotonic`)."""
        return [(name, str(pending.request), pending.since) for name, pending in list(self._pending.items())]

    def launched(self) -> list[tuple[str, str, bool]]:
        """Return what was agreed on last, oldest first, for who looks on: verbs, texts, and whether it has ended."""
        jobs, flight = list(self._running)[-LAST:], list(self._flight)
        last = [job.pending is not None and job.pending.done() for job in jobs]
        ended = [True] * (len(flight) - len(last)) + last
        return [(request.verb, str(request), has) for request, has in zip(flight, ended, strict=False)]

    def _ask(self, pending: Pending) -> None:
        request = pending.request
        if request.name in self._pending:
            raise UsageError(f"{self.comm.name}: {self._negotiation.refusal(request)}")
        try:
            self._negotiation.submit(request)
            self._pending[request.name] = pending
        except BaseException:  # of a signal's handler: nobody has been told yet
            self._negotiation.withdraw(request)
            self._pending.pop(request.name, None)
            raise

    # One cycle

    def _run_cycle(self) -> None:
        self._driver.midway = True
        with self._lock:
            overdue = self._patience.overdue(self._pending)
            announcement = self._negotiation.announce()
        self.cycles += 1
        if self._recording.recorder is not None:
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
                if name in self._pending:
                    self._warn(self._pending[name], everyone)
        self._driver.pace(has_agreed=bool(responses))
        if jobs:
            self._run(jobs)
        self._driver.midway = False  # at once: whoever is interrupted now has done its part

    def _run(self, jobs: Sequence[Job]) -> None:
        records = self._records.run(jobs)
        before = time.perf_counter()

        def finish(job: Job, value: Any, error: BaseException | None) -> None:
            nonlocal before
            if job.pending is None and (record := records.get(job.launch.request.name)) is not None:
                record.end(error)
            if job.pending is not None:
                # Several that ran as one end together: the first of them has the time of all.
                now = time.perf_counter()
                job.pending.seconds, before = now - before, now
                job.pending.finish(value, None if error is None else self._wording.of_one(job.pending.request, error))

        self._execution.run(jobs, finish)
        self._running = []

    def _take(self, responses: Sequence[Response]) -> list[Job]:
        """Fail what cannot run; return what can."""
        self._running = jobs = []  # first there, then no longer pending: one of both at any time
        find = self._pending.get
        for response in responses:
            name = response.request.name
            pending = find(name)
            if type(response) is Launch:
                jobs.append(Job(response, pending))
                self._flight.append(response.request)
            elif isinstance(response, Restart):
                self._restart(response)
                continue
            elif pending is None:
                continue
            elif isinstance(response, Joined):
                self._unnamed.count_anew()
                self.joins += 1
                pending.finish(response.last)
            else:
                assert isinstance(response, Failure)
                pending.finish(error=self._wording.refused(response))
            if pending is not None:
                del self._pending[name]
        for later in self._unnamed.due(self._pending):
            self._ask(later)
        if jobs:
            self._wording.last, self._wording.when = jobs[-1].launch.request, time.monotonic()
        return jobs

    def _restart(self, restart: Restart) -> None:
        """Give up what is pending, but for a restart of this rank that others have not come to."""
        own = self._pending.get(restart.request.name)
        for pending in self._give_up([]):
            if pending is not own:
                pending.finish(error=self._wording.restarted(pending.request, restart.by))
        if own is not None and not restart.complete:
            self._pending[restart.request.name] = own
        elif own is not None:
            self._unnamed.count_anew()
            self.restarts += 1
            self.failed.clear()  # whoever restarts need not ask for them
            own.finish()

    def _warn(self, pending: Pending, everyone: Sequence[RequestList]) -> None:
        reason = self._negotiation.explain(pending.request.name, everyone)
        if reason and not pending.warned:
            pending.warned = True
            log.warning("%s", self._wording.overdue(pending.request, time.monotonic() - pending.since, reason))

    # Waits that last, and failures

    def _fail(self, error: BaseException) -> None:
        """End all that is pending: this rank is out of step with the others, who are told."""
        with self._lock:
            running, waiting = self._requests()
            if self._ended is None:
                self._ended = self._wording.ended(error, running, waiting)
            ended, left = self._ended, self._give_up(self._running)
        if not isinstance(error, ShutdownError):
            self.comm.group.leave(self._wording.parting(error, [*running, *waiting]))
        for pending in left:
            pending.fail(self._wording.after(ended, pending.request))

    def _explain(self, waited: float, late: list[int]) -> str:
        """Return the warning about a long wait within a cycle."""
        with self._lock:
            running, waiting = self._requests()
        return self._wording.long_wait(waited, late, running, waiting)

    def _requests(self) -> tuple[list[Request], list[Request]]:
        """Return what is running and what is waiting."""
        running = [job.launch.request for job in self._running if job.pending is not None and not job.pending.done()]
        return running, [pending.request for pending in self._pending.values() if pending.request not in running]

    def _give_up(self, jobs: Sequence[Job]) -> list[Pending]:
        """Forget all that is pending, and return it and what the jobs are for."""
        running = [job.pending for job in jobs if job.pending is not None]
        found = dict.fromkeys([*running, *self._pending.values(), *self._unnamed.waiting()])
        self._pending.clear()
        self._unnamed.clear()
        return list(found)

    # The end

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or, if that takes longer than `timeout` s, what is."""
        deadline = time.monotonic() + timeout
        for pending in [*self._pending.values(), *self._unnamed.waiting()]:
            try:
                pending.wait(max(0.0, deadline - time.monotonic()))
            except StallError:
                if not pending.done():
                    return f"unfinished {pending.request}"
            except CommlibError:
                pending.seen = False  # whoever asked for it has not been told
                self.failed[pending] = None
        return ""

    def abandon(self) -> None:
        """Let nothing run in this forked child, whose copies of the locks may be held by threads that it lacks."""
        self._lock = threading.Lock()
        self._driver.abandon(self._lock)
        self._pending.clear()

    def close_group(self) -> None:
        """Close, and release the group. Collective, with nothing pending."""
        self.close()
        with self._driver.driving:
            if self._execution.staging is not None:
                self._execution.staging.close()
            self.comm.close()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        self._driver.join(timeout)

    def unseen_failure(self) -> str:
        """Return the first failed operation with an error that was never asked for, or ""."""
        for pending in list(self.failed):
            if (error := pending.unseen_error) is not None:
                return f"failed {pending.request} ({type(error).__name__}: {error})"
        return ""

    def close(self) -> None:
        """Accept nothing more; what has not run ends with ShutdownError. Never blocks."""
        with self._lock:
            self._driver.close()
            left = self._give_up([])  # what runs is given up by whoever runs it
        for pending in left:
            begin = self._wording.begin([pending.request])
            pending.fail(ShutdownError(f"{begin}: commlib was shut down before all ranks had asked for it"))
