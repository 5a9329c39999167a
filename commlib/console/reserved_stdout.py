"""reserve_stdout: reserve standard output for this program's own lines, for programs that parse them."""

from __future__ import annotations

import os
import sys


def reserve_stdout() -> None:
    """Redirect output of libraries from standard output to standard error, until the process ends.

    Some libraries print warnings to it (UCX), some of them while MPI ends, or later. Python's prints still go to
    standard output. Does nothing if `sys.stdout` is not the process's standard output.
    """
    try:
        if sys.stdout.fileno() != 1:
            return
    except (AttributeError, OSError, ValueError):  # replaced by a test, or closed
        return
    sys.stdout.flush()
    own, encoding, errors = os.dup(1), sys.stdout.encoding, sys.stdout.errors
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding=encoding, errors=errors)
