"""Runtime: the state that all communicators of one process share."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from commlib.config.settings import Config
from commlib.cost.chooser import Chooser
from commlib.runtime.deferred_free import DeferredFree
from commlib.runtime.poller import MessagePoller
from commlib.runtime.recording import Recording

# Seconds that a rank waits for final messages of the other ranks: after a group's failure, and in total at the end of
# the job. MPI_Finalize waits for all ranks anyway, and libraries complain about messages that arrive after it.
PARTING, LEAVING = 0.2, 2.0


class HangWatching(Protocol):
    """A thread that diagnoses hangs: see `commlib.runtime.hang_watch`."""

    @property
    def errors(self) -> Path | None:
        """The folder in which failing ranks leave their errors."""
        ...

    @property
    def hangs(self) -> Path:
        """The folder of the job's hangs."""
        ...

    def forecast(self, waited: float) -> str:
        """Return when the diagnosis of a wait is due, and how to get it now, as the end of a warning."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


@dataclass(slots=True)
class Runtime:
    """Settings, all groups, and the state of the process. One per process (per thread in loopback)."""

    config: Config = field(default_factory=Config)
    ranks_on_node: int = 1
    chooser: Chooser = field(default_factory=Chooser)  # the same on all ranks
    poller: MessagePoller = field(default_factory=MessagePoller)  # for the messages of all groups
    recording: Recording = field(default_factory=Recording)  # the recorded operations
    closing: bool = False  # pending waits must end
    services: Any = None  # the process sets, if named operations are used: `commlib.horovod.process_sets.Registry`
    token: str = ""  # the same on all ranks, and different after each `init`
    retired: DeferredFree = field(default_factory=DeferredFree)  # dropped groups that are not freed yet
    groups: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """All groups, which are closed at the end. Weak: a dropped group is freed."""
    waits: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    """The watchdogs of long waits of this process, by `id`. Weak: nothing records the end of a wait."""
    hang_watch: HangWatching | None = None
    difference: str = ""  # after the end: describes different calls of ranks that caused no error, with their group

    @property
    def spins(self) -> int:
        """The number of polls before a waiting rank yields its core."""
        if self.config.spins >= 0:
            return self.config.spins
        # The late peer may need this core; then every poll delays it.
        return 2000 if self.ranks_on_node <= (os.cpu_count() or 1) else 20

    def forecast(self, waited: float) -> str:
        """Return when a diagnosis is due, and how to get it now, as the end of a warning; "" without one."""
        return "" if self.hang_watch is None else self.hang_watch.forecast(waited)

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending in any group; return "" or, after `timeout` s, a running operation."""
        deadline = time.monotonic() + timeout
        drains = [self.poller.drain, *(group.progress.drain for group in list(self.groups))]
        if self.services is not None:
            drains.insert(0, self.services.drain)
        unfinished = [drain(max(0.0, deadline - time.monotonic())) for drain in drains]
        return next(filter(None, unfinished), "")

    def abandon(self) -> None:
        """Disable all groups in a forked child, which has no threads and must not call MPI: every call fails."""
        self.closing = True
        self.hang_watch = None
        self.recording.abandon()
        self.poller.abandon()
        if self.services is not None:
            for coordinator in self.services.coordinators():
                coordinator.abandon()
        for group in list(self.groups):
            group.halt()

    def end(self) -> str:
        """End all groups without hanging; return the first failure that no caller has seen, or ""."""
        groups = list(self.groups)
        if self.hang_watch is not None:
            self.hang_watch.close()
        failure, threads = "", [self.poller, *(group.progress for group in groups)]
        if self.services is not None:
            threads += self.services.coordinators()
            failure = self.services.close()
            self.services = None
        for group in groups:
            group.progress.close()
        self.poller.close()
        for group in groups:
            group.announce()
        parted = time.monotonic() + LEAVING
        for group in groups:
            self.difference = group.leave(deadline=parted) or self.difference
            group.retire()
        self.closing = True
        deadline = time.monotonic() + 1.0  # waits check `closing` every 0.1 s
        for threaded in threads:
            threaded.join(max(0.0, deadline - time.monotonic()))
        self.recording.close()
        return failure or next(filter(None, [group.progress.unseen_failure() for group in groups]), "")
