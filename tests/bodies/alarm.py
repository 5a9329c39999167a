"""An alarm that raises in this thread at any point, as a user's signal handler may."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Alarm(Exception):
    """The time is up."""


@contextlib.contextmanager
def alarm(seconds: float, again: float = 0.05) -> Iterator[None]:
    """Raise Alarm in this thread after so many seconds.

    again: and every so many seconds after that, in case Python ignored it in a destructor; 0 for once only.
    """

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds + 1e-4, again)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
