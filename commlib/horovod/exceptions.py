"""Exceptions: define those of Horovod that scripts catch."""

from __future__ import annotations

from commlib.errors import CommlibError

HorovodInternalError = CommlibError
"""The error that scripts catch when an operation failed: the base of all commlib errors."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. Only a program raises it: the ranks of a job do not change.

    Args:
        skip_sync: Continue training without taking the state from rank 0.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The core and an adapter do not match. Never raised: they are installed together."""
