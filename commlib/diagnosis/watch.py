"""Watch: a time limit for code that may hang or die inside MPI, where no signal handler or Python thread runs.

A forked process keeps the time, and prints the report if the parent dies. Fork before MPI starts.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import TracebackType

_AFTER = 1.0  # seconds by which other ranks wait longer, so that the first rank prints first
_DONE = "done"


class Watch:
    """Ends this process if a step takes too long. text: printed to standard error before that; "" prints nothing.

    The text is also printed if this process is killed or crashes.

    with Watch("what is known so far") as watch:
        watch.step("start MPI", 30)
        ...
    """

    def __init__(self, text: str) -> None:
        self._text, self._child, self._pipe = text, 0, -1

    def __enter__(self) -> Watch:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        read, self._pipe = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._pipe)
            _keep_time(read, parent, self._text)
            os._exit(0)
        os.close(read)
        return self

    def step(self, what: str, seconds: float) -> None:
        """Begin a step with a limit in seconds; the previous step has ended."""
        os.write(self._pipe, f"{seconds} {what}\n".encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._pipe, f"{_DONE}\n".encode())
        os.close(self._pipe)
        os.waitpid(self._child, 0)


def _keep_time(pipe: int, parent: int, text: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # this process ends with its parent
    what, limit = "begin", 60.0
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            continue
        lines = os.read(pipe, 1 << 16).decode().splitlines()
        if not lines:
            _print_report(text, f'this process ended during the step "{what}"')
            return
        if lines[-1] == _DONE:
            return
        seconds, _, what = lines[-1].partition(" ")
        limit = float(seconds)
        end = time.monotonic() + limit
    _print_report(text, f"this process did not {what} within {limit:g} s")
    if not text:
        time.sleep(_AFTER)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def _print_report(text: str, why: str) -> None:
    if text:
        os.write(2, f"{text}\n- error: {why}\n".encode())
