"""Watch: a time limit for what may hang inside MPI, where no signal handler and no thread of Python runs.

A forked process keeps the time. Fork before MPI is started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import TracebackType

_AFTER = 1.0  # seconds that the other ranks leave the first one to speak


class Watch:
    """Ends this process if a step takes too long. text: what is printed before that, on standard error, if anything.

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
        """Begin a step, which may take so many seconds; the one before has ended."""
        os.write(self._pipe, f"{seconds} {what}\n".encode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        os.waitpid(self._child, 0)


def _keep_time(pipe: int, parent: int, text: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process that it watches
    what, end, limit = "begin", time.monotonic() + 60.0, 60.0
    while True:
        left = end - time.monotonic()
        if left <= 0:
            break
        if select.select([pipe], [], [], left)[0]:
            told = os.read(pipe, 1 << 16).decode()
            if not told:
                return
            seconds, _, what = told.splitlines()[-1].partition(" ")
            limit = float(seconds)
            end = time.monotonic() + limit
    if text:
        os.write(2, f"{text}\n\nit did not {what} within {limit:g} s\n".encode())
    else:
        time.sleep(_AFTER)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
