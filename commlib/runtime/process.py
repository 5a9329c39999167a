"""Runtime: hold what all communicators of one process share."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from commlib.config.settings import Config
from commlib.cost.chooser import Chooser
from commlib.runtime.poller import MessagePoller
from commlib.runtime.recording import Recording
from commlib.runtime.retired import Retired

# Seconds that a rank waits for the last words of others where a group has failed, and in all where the job ends. MPI's
# own end waits for all ranks anyway, and libraries complain of words that come after those that take them have gone.
PARTING, LEAVING = 0.2, 2.0


class HangWatching(Protocol):
    """Explains hangs: see `commlib.runtime.hang_watch`."""

    def close(self) -> None:
        """Watch no more."""
        ...


@dataclass(slots=True)
class Runtime:
    """Settings, all groups, and the state of the process. One for each process (each thread in loopback)."""

    config: Config = field(default_factory=Config)
    ranks_on_node: int = 1
    chooser: Chooser = field(default_factory=Chooser)  # alike on all ranks
    poller: MessagePoller = field(default_factory=MessagePoller)  # of the messages of all groups
    recording: Recording = field(default_factory=Recording)  # of what operations do
    closing: bool = False  # waits that still last must end
    services: Any = None  # the process sets, where named operations are used: `commlib.horovod.process_sets.Registry`
    token: str = ""  # the same on all ranks, and another one after each `init`
    retired: Retired = field(default_factory=Retired)  # groups that are used no more
    groups: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # all communicators, to be told of the end
    waits: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    """The watchdogs of waits that last, each by its `id`: what this process waits for."""
    hang_watch: HangWatching | None = None
    difference: str = ""  # after the end: in which group ranks made different calls that no error came of, in words

    @property
    def spins(self) -> int:
        """How often a waiting rank polls before it gives its core away."""
        if self.config.spins >= 0:
            return self.config.spins
        # The peer that is waited for may need this very core; then every poll delays it.
        return 2000 if self.ranks_on_node <= (os.cpu_count() or 1) else 20

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending in any group; return "" or, after `timeout` s, what is still running."""
        deadline = time.monotonic() + timeout
        drains = [self.poller.drain, *(group.progress.drain for group in list(self.groups))]
        if self.services is not None:
            drains.insert(0, self.services.drain)
        left_over = [drain(max(0.0, deadline - time.monotonic())) for drain in drains]
        return next(filter(None, left_over), "")

    def abandon(self) -> None:
        """Give everything up in a forked child, where no thread runs on and MPI is not to be touched: no call works."""
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
        """End all groups without ever hanging; return the first failure that was never asked for, or ""."""
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
        deadline = time.monotonic() + 1.0  # waits look at `closing` every 0.1 s
        for threaded in threads:
            threaded.join(max(0.0, deadline - time.monotonic()))
        self.recording.close()
        return failure or next(filter(None, [group.progress.unseen_failure() for group in groups]), "")
