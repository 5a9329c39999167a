"""Forked children: copies of a process that have its memory, but none of its threads and no place in MPI.

What a child does must not look like its parent's doing: it may not tell the other ranks anything, nor free what MPI
holds. `watch` is called by `init`; children that were forked before are processes like any other.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from commlib.errors import UsageError

_parent = 0  # of a child: the process that called init


def watch(become_child: Callable[[], None]) -> None:
    """Call `become_child` in every child that is forked from now on. Call it once."""
    process = os.getpid()

    def after_in_child() -> None:
        global _parent
        if not _parent:  # a child's child is known already
            _parent = process
            become_child()

    os.register_at_fork(after_in_child=after_in_child)


def is_child() -> bool:
    """Return whether this process was forked by one that had called `init`."""
    return _parent != 0


def refusal(call: str) -> UsageError:
    """Return the error for a call in a child."""
    return UsageError(
        f"{call}: process {os.getpid()} was forked by process {_parent} after commlib.init there, and takes no part "
        "in MPI: communicate in the parent, or start processes that do not (multiprocessing: 'spawn' or 'forkserver')"
    )


def check(call: str) -> None:
    """Raise UsageError in a child."""
    if _parent:
        raise refusal(call)
