"""Coordinator: named operations of one group, asked for in any order on any rank.

A cycle is one small exchange (`Negotiation` says of what) and then the operations that it agreed on. A rank takes part
in a cycle while it waits for something: nothing can be agreed without it, and with nothing to wait for it need not
know. So no cycle is run by the clock, and an idle job does nothing at all.

Cycles are run by whoever waits for an operation, else by a thread that is started with the first one that nobody waits
for. Every rank runs the same cycles in the same order on a group of the coordinator's own.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from commlib import forks
from commlib.coordinator.compressed import CompressedReductions
from commlib.coordinator.exchange import Exchange
from commlib.coordinator.execution import Execution
from commlib.coordinator.job import Job
from commlib.coordinator.negotiation import Failure, Joined, Launch, Negotiation, News, Verdict
from commlib.coordinator.on_device import Staging
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request
from commlib.coordinator.wording import Wording
from commlib.errors import CommlibError, MismatchError, PeerError, ShutdownError, StallError, UsageError
from commlib.observe.recorder import Record
from commlib.runtime.recording import Recording

log = logging.getLogger("commlib")

# Operations that the user gives no name; so many can be in flight at once, more of them queue up.
_UNNAMED, _UNNAMED_NAMES = ".noname.", 64

# With nothing new to tell, a rank looks this often (seconds) whether others have, and comes to a cycle at the latest.
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 2e-3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


class Coordinator:
    """One rank's side. `comm` is a group that nobody else uses; `members` are what its ranks are called."""

    def __init__(self, comm: Any, members: Sequence[int]) -> None:
        self.comm = comm
        self.members = tuple(members)
        self._counters: defaultdict[str, itertools.count[int]] = defaultdict(
            itertools.count
        )  # of unnamed ones, by verb
        self._later: defaultdict[str, deque[Pending]] = defaultdict(deque)  # unnamed, until their name is free
        self.failed: dict[Pending, None] = {}
        """Those that nobody has asked for since."""
        self.requests: dict[Hashable, Request] = {}
        """Requests that were made before, by what they are made of: to check and to compare them anew takes longer."""
        self._recording: Recording = comm.runtime.recording
        self._launched = 0  # operations so far, on all ranks alike
        config = comm.config
        self._warning, self._timeout = config.stall_warning, config.timeout
        self._negotiation = Negotiation(comm.rank, self.members, capacity=config.known_names)
        self._exchange = Exchange(comm)
        self._execution = Execution(comm, self.members, config.fusion_mib << 20)
        self._pending: dict[str, Pending] = {}
        self._lock = threading.Lock()  # of the negotiation and what is pending
        self._changed = threading.Condition(self._lock)
        self._driving = threading.Lock()  # held by whoever runs cycles
        self._thread: threading.Thread | None = None
        self._closed = False
        self._driver: object = None  # who took `_driving` last: set first, so that whoever leaves knows its own
        self._running: list[Job] = []  # agreed on, not ended
        self._midway = False  # in a cycle: to leave it now is to be out of step
        self._failure: tuple[type[CommlibError], str, BaseException] | None = None  # type and words of later errors
        self._pause = _SHORTEST_PAUSE
        self._napping = False  # whoever runs cycles has nothing to tell
        self._woken = False  # the thread has been told, and has not come to it yet
        self.cycles = 0
        """How many exchanges there were."""
        self._wording = Wording(comm, self.members, self._negotiation)
        comm.group.explain = self._explain

    @property
    def compressed(self) -> CompressedReductions:
        """The all-reduces whose tensors are compressed, and what is remembered of them."""
        return self._execution.compressed

    def take_devices(self) -> None:
        """Let operations have arrays of devices, as `OnDevice`. Not collective."""
        if self._execution.staging is None:
            self._execution.staging = Staging(self.comm.group)

    def __repr__(self) -> str:
        return f"<Coordinator of {self.comm.name}: {len(self._pending)} pending, {self.cycles} cycles>"

    def next_name(self, verb: str) -> str:
        """Return the name of this rank's next operation of a verb that the user gives none.

        Names come round again, so that an operation in a loop soon has one that ranks know.
        """
        return f"{verb}{_UNNAMED}{next(self._counters[verb]) % _UNNAMED_NAMES}"

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
            if self._closed:
                forks.check(str(request))
                raise ShutdownError(f"{request}: commlib has been shut down")
            if self._failure is not None:
                raise self._failed(request)
            if "join" in self._pending and request.verb != "join":
                raise UsageError(f"{request}: this rank has joined, and takes no further part until all have")
            if request.name in self._pending and _UNNAMED in request.name:
                self._later[request.name].append(pending)
            else:
                self._ask(pending)
            if self._recording.recorder is not None and (record := self._record(request, inputs)) is not None:
                pending.record = record
                record.queue()
            if self._napping:
                self._changed.notify_all()
            elif not blocking and not self._driving.locked():
                self._wake_thread()
        return pending

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

    def _record(self, request: Request, inputs: Sequence[Any] = ()) -> Record | None:
        """Return the record of an operation; None if nothing is recorded."""
        recorder = self._recording.recorder
        if recorder is None:
            return None
        nbytes = sum(getattr(array, "nbytes", 0) for array in inputs)
        return Record(recorder, request.verb, self.comm.name, (request.name,), nbytes=nbytes, name=request.name)

    def wake(self) -> None:
        """See to it that cycles are run although nobody waits for an operation."""
        with self._lock:
            if self._pending:
                self._wake_thread()

    def drive(self, done: Callable[[], bool]) -> None:
        """Run cycles in this thread until `done()` or nothing is pending; return at once if another thread does.

        Raises what the handler of a signal raises, anywhere in here. Between cycles that changes nothing: what is
        pending stays so. Within one, this rank is out of step with the others, and the group has failed.
        """
        me = object()
        try:
            with self._lock:
                if self._driving.locked():
                    return
                self._driver = me
                self._driving.acquire()
            while not done() and self._pending and not self._closed:
                self._await_reason()
                self._cycle()
        except CommlibError as error:
            self._fail(error)
        except BaseException as error:
            if self._driver is me and self._midway:
                self._fail(error)
            raise
        finally:
            if self._driver is me:
                try:
                    self._driving.release()
                except RuntimeError:
                    pass  # not even taken
                finally:
                    if self._pending:  # whoever asks later sees that nobody drives
                        self.wake()

    # One cycle

    def _await_reason(self) -> None:
        """Wait for something to tell, for another rank that has, or for a while."""
        nap, until = _SHORTEST_NAP, time.monotonic() + self._pause
        with self._lock:
            while not self._negotiation.has_news and not self._closed:
                if self.comm.group.is_awaited() or time.monotonic() > until:
                    break
                self._napping = True
                try:
                    self._changed.wait(nap)
                finally:
                    self._napping = False
                nap = min(2 * nap, _LONGEST_NAP)

    def _cycle(self) -> None:
        self._midway = True
        with self._lock:
            overdue = self._overdue()
            announcement = self._negotiation.announce()
        self.cycles += 1
        recorder = self._recording.recorder
        if recorder is not None and recorder.marks_cycles:
            recorder.mark("CYCLE_START", self.comm.name)

        def in_full() -> News:
            with self._lock:
                expired = tuple(name for name, too_late in overdue.items() if too_late)
                return News(announcement.requests, expired, tuple(self._negotiation.waiting))

        bits, everyone = self._exchange.run(announcement, bool(overdue), in_full)
        with self._lock:
            verdicts = self._negotiation.agree(bits, everyone)
            jobs = self._take(verdicts)
            for name in overdue:
                if name in self._pending:
                    self._warn(self._pending[name], everyone)
        self._pause = _SHORTEST_PAUSE if verdicts else min(2 * self._pause, _LONGEST_PAUSE)
        if jobs:
            self._run(jobs)
        self._midway = False

    def _run(self, jobs: Sequence[Job]) -> None:
        records = {} if self._recording.recorder is None else self._note_run(jobs)
        self._launched += len(jobs)
        before = time.perf_counter()

        def finish(job: Job, value: Any, error: BaseException | None) -> None:
            nonlocal before
            if job.pending is None and (record := records.get(job.launch.request.name)) is not None:
                record.end(error)
            if job.pending is not None:
                # Several that ran as one end together: the first of them has the time of all.
                now = time.perf_counter()
                job.pending.seconds, before = now - before, now
                job.pending.finish(value, None if error is None else self._reworded(job.pending.request, error))

        self._execution.run(jobs, finish)
        self._running = []

    def _note_run(self, jobs: Sequence[Job]) -> dict[str, Record]:
        """Write that operations run; return the records by their names."""
        records = {}
        for number, job in enumerate(jobs, self._launched + 1):
            request = job.launch.request
            record = self._record(request) if job.pending is None else job.pending.record
            if record is not None:
                record.sequence = number
                record.run()
                records[request.name] = record
        return records

    def _take(self, verdicts: Sequence[Verdict]) -> list[Job]:
        """Fail what cannot run; return what can."""
        self._running = jobs = []  # first there, then no longer pending: one of both at any time
        find = self._pending.get
        for verdict in verdicts:
            name = verdict.request.name
            pending = find(name)
            if type(verdict) is Launch:
                jobs.append(Job(verdict, pending))
            elif pending is None:
                continue
            elif isinstance(verdict, Joined):
                self._counters.clear()  # ranks have counted different numbers; from here on they count alike again
                pending.finish(verdict.last)
            else:
                assert isinstance(verdict, Failure)
                pending.finish(error=self._error(verdict))
            if pending is not None:
                del self._pending[name]
        for name in [name for name in self._later if name not in self._pending]:
            self._ask(self._later[name].popleft())
            if not self._later[name]:
                del self._later[name]
        if jobs:
            self._wording.last, self._wording.when = jobs[-1].launch.request, time.monotonic()
        return jobs

    # Errors

    def _error(self, failure: Failure) -> CommlibError:
        text = f"{self._wording.begin([failure.request])}: {failure.reason}"
        if failure.late:
            words = f"(COMMLIB_TIMEOUT={self._timeout:g}); other operations go on{self._did_last()}"
            return StallError(f"{text} {words}")
        return MismatchError(f"{text}. Nothing was sent; the group stays usable")

    def _reworded(self, request: Request, error: BaseException) -> CommlibError:
        """Return what one operation was refused with: an error for each, of those that ran as one."""
        worded = UsageError(f"{self._wording.begin([request])}: {error}")
        worded.__cause__ = error
        return worded

    def _failed(self, request: Request) -> CommlibError:
        """Return the error of one operation in a group that can run none any more: each time a new one."""
        assert self._failure is not None
        kind, reason, cause = self._failure
        error = kind(f"{self._wording.begin([request])}: {reason}; {self.comm.name} cannot be used any more")
        if not isinstance(cause, PeerError | StallError | ShutdownError):  # of which everything has been said
            error.__cause__ = cause
        return error

    def _fail(self, error: BaseException) -> None:
        """End all that is pending: this rank is out of step with the others, who are told."""
        with self._lock:
            running, waiting = self._requests()
            if self._failure is None:
                kind, reason = self._wording.reason(error, running, waiting, self._timeout)
                self._failure = kind, reason + (self._did_last() if kind is StallError else ""), error
            left = self._give_up(self._running)
        if not isinstance(error, ShutdownError):
            self.comm.group.leave(self._wording.parting(error, [*running, *waiting]))
        for pending in left:
            pending.fail(self._failed(pending.request))

    def _requests(self) -> tuple[list[Request], list[Request]]:
        """Return what is running and what is waiting."""
        running = [job.launch.request for job in self._running if job.pending is not None and not job.pending.done()]
        return running, [pending.request for pending in self._pending.values() if pending.request not in running]

    # Those who wait long

    def _overdue(self) -> dict[str, bool]:
        """Return the names of operations that have waited long and were not told of; True: too long."""
        now = time.monotonic()
        found = {}
        for name, pending in self._pending.items():
            waited = now - pending.since
            if 0 < self._timeout < waited:
                found[name] = True
            elif waited > self._warning and not pending.warned:
                found[name] = False
            elif waited < min(self._warning, self._timeout or self._warning):
                break  # those behind it are younger
        return found

    def _warn(self, pending: Pending, everyone: Sequence[News]) -> None:
        reason = self._negotiation.explain(pending.request.name, everyone)
        if not reason or pending.warned:
            return
        pending.warned = True
        waited = time.monotonic() - pending.since
        begin = self._wording.begin([pending.request])
        log.warning("%s has waited %.0f s: %s%s", begin, waited, reason, self._did_last())

    def _explain(self, waited: float, late: list[int]) -> str:
        """Return the warning about a long wait within a cycle."""
        with self._lock:
            running, waiting = self._requests()
        return self._wording.long_wait(waited, late, running, waiting) + self._did_last()

    def _did_last(self) -> str:
        """Return what this rank did last, to be appended to a message; "" if nothing is recorded."""
        return self._recording.did_last(self.comm.name, named=True)

    # The thread, and the end

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="commlib-coordinator", daemon=True)
            self._thread.start()
        if not self._woken:
            self._woken = True
            self._changed.notify_all()

    def _loop(self) -> None:
        """Run cycles while something is pending and nobody else does."""
        while True:
            with self._lock:
                self._changed.wait_for(self._is_due)
                if self._closed:
                    return
            try:
                self.drive(lambda: False)
            except BaseException as error:
                self._fail(error)  # where it has not

    def _is_due(self) -> bool:
        self._woken = False
        return self._closed or (bool(self._pending) and not self._driving.locked())

    def _give_up(self, jobs: Sequence[Job]) -> list[Pending]:
        """Forget all that is pending, and return it and what the jobs are for."""
        running = [job.pending for job in jobs if job.pending is not None]
        later = [pending for queue in self._later.values() for pending in queue]
        found = dict.fromkeys([*running, *self._pending.values(), *later])
        self._pending.clear()
        self._later.clear()
        return list(found)

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or, if that takes longer than `timeout` s, what is."""
        deadline = time.monotonic() + timeout
        for pending in [*self._pending.values(), *(later for queue in self._later.values() for later in queue)]:
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
        self._changed = threading.Condition(self._lock)
        self._driving.acquire(blocking=False)  # for ever: whoever waits is told at once
        self._closed = True
        self._pending.clear()
        self._thread = None

    def close_group(self) -> None:
        """Close, and release the group. Collective, with nothing pending."""
        self.close()
        with self._driving:
            if self._execution.staging is not None:
                self._execution.staging.close()
            self.comm.close()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def unseen_failure(self) -> str:
        """Return the first failed operation whose error nobody has asked for, or ""."""
        for pending in list(self.failed):
            if (error := pending.unseen_error) is not None:
                return f"failed {pending.request} ({type(error).__name__}: {error})"
        return ""

    def close(self) -> None:
        """Accept nothing more; what has not run ends with ShutdownError. Never blocks."""
        with self._lock:
            self._closed = True
            left = self._give_up([])  # what runs is given up by whoever runs it
            self._changed.notify_all()
        for pending in left:
            begin = self._wording.begin([pending.request])
            pending.fail(ShutdownError(f"{begin}: commlib was shut down before all ranks had asked for it"))
