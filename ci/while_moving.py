#!/usr/bin/env python3
"""Run a command for as long as it prints: on a slow machine it may take its time, but it cannot hang.

    python ci/while_moving.py SECONDS[:MOST] COMMAND...

Its standard output and standard error are forwarded to standard output at once. If it prints nothing for SECONDS,
the command and all processes of its group get SIGTERM, and SIGKILL 10 s later, and the exit code is 124; likewise if
it runs for more than MOST seconds. Otherwise the exit code is the command's, or 128 + n if signal n ended it.
SIGTERM, SIGINT and SIGHUP end the command too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

STALLED = 124  # as for `timeout`
GRACE = 10.0  # seconds from SIGTERM to SIGKILL


def run(silence: float, most: float, command: list[str]) -> int:
    """Run the command and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0) as job:
        try:
            if _pass_on(job, silence, most):
                return job.returncode if job.returncode >= 0 else 128 - job.returncode
            why = f"no output for {silence:g} s, or still some after {most:g} s"
            print(f"\nwhile_moving: {why}, ending: {' '.join(command)}", flush=True)
            return STALLED
        finally:
            _end(job)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _pass_on(job: subprocess.Popen[bytes], silence: float, most: float) -> bool:
    """Forward the job's output until it has ended, has been silent for `silence` seconds, or has run too long.

    Return whether it has ended.
    """
    assert job.stdout is not None
    is_open = True
    first = last = time.monotonic()
    while time.monotonic() < min(last + silence, first + most):
        # Not until the end of file: the job's leftover processes may keep the pipe open, or the job may close it early.
        has_ended = job.poll() is not None
        ready = select.select([job.stdout] if is_open else [], [], [], 0.0 if has_ended else min(0.2, silence))[0]
        if ready:
            data = os.read(job.stdout.fileno(), 1 << 16)
            is_open = bool(data)
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            if data:
                last = time.monotonic()
        elif has_ended:
            return True
    return False


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of the job's group, and forward their last output. No-op if none remain."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
        _pass_on(job, GRACE, GRACE)
        os.killpg(job.pid, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    silence, _, most = sys.argv[1].partition(":")
    sys.exit(run(float(silence), float(most or "inf"), sys.argv[2:]))
