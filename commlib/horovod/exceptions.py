"""Exceptions: define those of Horovod, as far as scripts catch them."""

from __future__ import annotations

from commlib.errors import CommlibError

HorovodInternalError = CommlibError
"""What scripts catch when an operation failed: everything that commlib raises."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. Never raised so far: a job keeps its ranks."""


class HorovodVersionMismatchError(ImportError):
    """The core and an adapter do not fit. Never raised: they are installed as one."""
