"""own_stdout: let nothing but this program's own lines come to standard output, for whoever reads them by a program."""

from __future__ import annotations

import os
import sys


def own_stdout() -> None:
    """Let what libraries write to standard output go to standard error, until the process ends.

    Some write warnings there (UCX), and some of them as MPI ends, or later. Python's own prints go where they went.
    Nothing is done where `sys.stdout` is no file's, or another one's.
    """
    try:
        if sys.stdout.fileno() != 1:
            return
    except (AttributeError, OSError, ValueError):  # of a test, or closed
        return
    sys.stdout.flush()
    own, encoding, errors = os.dup(1), sys.stdout.encoding, sys.stdout.errors
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding=encoding, errors=errors)
