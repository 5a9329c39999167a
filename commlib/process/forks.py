"""Forked children: copies of a process with its memory, but without its threads and without a rank in MPI.

A child must not act as its parent: it may neither send to other ranks nor free MPI's resources. `init` calls `watch`;
children forked before that are ordinary processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from commlib.errors import UsageError

_parent = 0  # in a child: the id of the process that called init


def watch(become_child: Callable[[], None]) -> None:
    """Call `become_child` in every child forked from now on. Call `watch` once."""
    process = os.getpid()

    def after_in_child() -> None:
        global _parent
        if not _parent:  # not in a child's child
            _parent = process
            become_child()

    os.register_at_fork(after_in_child=after_in_child)


def is_child() -> bool:
    """Return whether this process was forked from one that had called `init`."""
    return _parent != 0


def refusal(call: str) -> UsageError:
    """Return the error for a call in a child."""
    return UsageError(
        f"{call}: process {os.getpid()} was forked by process {_parent} after commlib.init, and takes no part in MPI: "
        "communicate in the parent, or do not communicate in children (multiprocessing: use 'spawn' or 'forkserver')"
    )


def check(call: str) -> None:
    """Raise UsageError in a child."""
    if _parent:
        raise refusal(call)
