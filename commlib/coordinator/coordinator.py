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
from commlib.coordinator.execution import Execution, Job
from commlib.coordinator.negotiation import Failure, Joined, Launch, Negotiation, News, Verdict
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request
from commlib.errors import CommlibError, MismatchError, ShutdownError, StallError, UsageError
from commlib.observe.timeline import Timeline

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
        self.timeline: Timeline | None = None
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
        self._last: tuple[Any, float] = "nothing yet", time.monotonic()  # what all ranks asked for, and when
        self._pause = _SHORTEST_PAUSE
        self._napping = False  # whoever runs cycles has nothing to tell
        self._woken = False  # the thread has been told, and has not come to it yet
        self.cycles = 0
        """How many exchanges there were."""
        comm.explain = self._explain

    @property
    def compressed(self) -> CompressedReductions:
        """The all-reduces whose tensors are compressed, and what is remembered of them."""
        return self._execution.compressed

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
        if forks.is_child():
            raise forks.refusal(str(request))
        pending = Pending(self, request, inputs, outputs, extra)
        with self._lock:
            if self._closed:
                raise ShutdownError(f"{request}: commlib has been shut down")
            if self.comm.failure is not None:
                raise self.comm.failure
            if "join" in self._pending and request.verb != "join":
                raise UsageError(f"{request}: this rank has joined, and takes no further part until all have")
            if request.name not in self._pending or _UNNAMED not in request.name:
                self._ask(pending)
            else:
                self._later[request.name].append(pending)
            if self.timeline is not None:
                self.timeline.begin(request.name, f"NEGOTIATE_{request.verb.upper()}")
            if self._napping:
                self._changed.notify_all()
            elif not blocking and not self._driving.locked():
                self._wake_thread()
        return pending

    def _ask(self, pending: Pending) -> None:
        request = pending.request
        try:
            self._negotiation.submit(request)
        except ValueError as error:
            raise UsageError(f"{self.comm.name}: {error}") from None
        self._pending[request.name] = pending

    def wake(self) -> None:
        """See to it that cycles are run although nobody waits for an operation."""
        with self._lock:
            if self._pending:
                self._wake_thread()

    def drive(self, done: Callable[[], bool]) -> None:
        """Run cycles in this thread until `done()` or nothing is pending; return at once if another thread does."""
        if not self._driving.acquire(blocking=False):
            return
        try:
            while not done() and self._pending and not self._closed:
                self._await_reason()
                self._cycle()
        except BaseException as error:
            self._fail_all(error)
            if not isinstance(error, CommlibError):
                raise
        finally:
            self._driving.release()
            self.wake()

    # One cycle

    def _await_reason(self) -> None:
        """Wait for something to tell, for another rank that has, or for a while."""
        nap, until = _SHORTEST_NAP, time.monotonic() + self._pause
        with self._lock:
            while not self._negotiation.has_news and not self._closed:
                if self.comm.is_awaited() or time.monotonic() > until:
                    break
                self._napping = True
                self._changed.wait(nap)
                self._napping = False
                nap = min(2 * nap, _LONGEST_NAP)

    def _cycle(self) -> None:
        with self._lock:
            overdue = self._overdue()
            announcement = self._negotiation.announce()
        self.cycles += 1
        if self.timeline is not None and self.timeline.mark_cycles:
            self.timeline.mark("CYCLE_START")

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

    def _run(self, jobs: Sequence[Job]) -> None:
        timeline = self.timeline
        if timeline is not None:
            for job in jobs:
                timeline.begin(job.launch.request.name, job.launch.request.verb.upper())
        before = time.perf_counter()

        def finish(job: Job, value: Any, error: BaseException | None) -> None:
            nonlocal before
            if timeline is not None:
                timeline.end(job.launch.request.name)
            if job.pending is not None:
                # Several that ran as one end together: the first of them has the time of all.
                now = time.perf_counter()
                job.pending.seconds, before = now - before, now
                job.pending.finish(value, error)

        self._execution.run(jobs, finish)

    def _take(self, verdicts: Sequence[Verdict]) -> list[Job]:
        """Fail what cannot run; return what can."""
        jobs = []
        pop, timeline = self._pending.pop, self.timeline
        for verdict in verdicts:
            pending = pop(verdict.request.name, None)
            if pending is not None and timeline is not None:
                timeline.end(verdict.request.name)
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
        for name in [name for name in self._later if name not in self._pending]:
            self._ask(self._later[name].popleft())
            if not self._later[name]:
                del self._later[name]
        if jobs:
            self._last = jobs[-1].launch.request, time.monotonic()
        return jobs

    def _error(self, failure: Failure) -> CommlibError:
        rank = self.members[self.comm.rank]
        text = f"{self.comm.name}: {failure.request}: rank {rank}: {failure.reason}"
        if failure.late:
            return StallError(f"{text} (COMMLIB_TIMEOUT={self._timeout:g}); other operations go on")
        return MismatchError(f"{text}. Nothing was sent; the group stays usable")

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
        rank = self.members[self.comm.rank]
        log.warning("%s: %s: rank %d has waited %.0f s: %s", self.comm.name, pending.request, rank, waited, reason)

    def _explain(self) -> str:
        """Return what is waited for, for messages about ranks that do not even come to a cycle."""
        names = list(self._pending)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        what, when = self._last
        return (
            f"; this rank waits for {', '.join(map(repr, names[:5]))}{more}; the last operation of all ranks was "
            f"{what}, {time.monotonic() - when:.0f} s ago, and those not there yet have asked for nothing since"
        )

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
            except BaseException:
                return  # whoever waits has it

    def _is_due(self) -> bool:
        self._woken = False
        return self._closed or (bool(self._pending) and not self._driving.locked())

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            failed = self._give_up()
            self._closed = self._closed or not isinstance(error, CommlibError)
        for pending in failed:
            pending.finish(error=error)

    def _give_up(self) -> list[Pending]:
        """Forget all that is pending, and return it."""
        found = [*self._pending.values(), *(pending for queue in self._later.values() for pending in queue)]
        self._pending.clear()
        self._later.clear()
        return found

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
        self._pending.clear()
        self._thread = None

    def close_group(self) -> None:
        """Close, and release the group. Collective, with nothing pending."""
        self.close()
        with self._driving:
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
            left = self._give_up()
            self._changed.notify_all()
        for pending in left:
            pending.finish(error=ShutdownError(f"{pending.request}: commlib was shut down before all ranks had asked"))
