"""Exceptions: define those of Horovod, as far as scripts catch them."""

from __future__ import annotations

from commlib.errors import CommlibError

HorovodInternalError = CommlibError
"""What scripts catch when an operation failed: everything that commlib raises."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. Only a program raises it: a job keeps its ranks.

    skip_sync: the state need not be taken from rank 0 before training goes on.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The core and an adapter do not fit. Never raised: they are installed as one."""
