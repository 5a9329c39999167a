#!/usr/bin/env python3
"""Run a command for as long as it goes on printing: on a slow machine it may take its time, but it cannot hang.

    python ci/while_moving.py SECONDS[:MOST] COMMAND...

What it prints, on standard output and standard error, is passed on to standard output at once. When nothing has come
for so many seconds the command is asked to end, with all processes of its group, and killed 10 s later; the exit code
is 124 then. So it is if the command goes on for more than MOST seconds, printing. Else it is the command's, 128 + n if
a signal n ended it. SIGTERM, SIGINT and SIGHUP end the command too.
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

STALLED = 124  # what `timeout` says
GRACE = 10.0  # seconds from being asked to end to being killed


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
    """Pass on what the job prints until it has ended, has been silent for so long, or has taken too long in all.

    Return whether it has ended.
    """
    assert job.stdout is not None
    is_open = True
    first = last = time.monotonic()
    while time.monotonic() < min(last + silence, first + most):
        # Not until the end of file: what the job leaves behind may keep the pipe open, or the job may close it early.
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
    """End what is left of the job's group, and pass on its last words. Without effect on a job that left nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
        _pass_on(job, GRACE, GRACE)
        os.killpg(job.pid, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    silence, _, most = sys.argv[1].partition(":")
    sys.exit(run(float(silence), float(most or "inf"), sys.argv[2:]))
