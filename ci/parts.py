"""Parts: run commands two at a time, print the output of each as it runs, in order, and summarise the results.

Most tests wait for most of the time, so two parts keep two cores busy; LANES=1 runs one after another. A part may take
long, but it is ended when it has printed nothing for 5 minutes (SILENCE=seconds).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SILENCE = os.environ.get("SILENCE", "300")  # seconds: more than any one test may take
LONGEST = 7200  # seconds of one part, even if it still prints
_COLOR = re.compile(r"\033\[[0-9;]*m")
_LAST = re.compile(r"^=* ?\d+ (passed|failed|skipped|error).* in [\d.]+s", re.MULTILINE)
_REASON = re.compile(r"^SKIPPED \[\d+\] \S+ (.*)$", re.MULTILINE)


@dataclass(slots=True)
class Part:
    """A command with its name, its environment, and how it went."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    code: int | None = None  # None until it has ended
    seconds: float = 0.0
    core_seconds: float = 0.0  # of all its processes

    def verdict(self) -> str:
        """Return how the part went. Pytest succeeds, too, if it has skipped all tests."""
        if self.code == 124:
            return f"FAILED (printed nothing for {SILENCE} s, or went on for {LONGEST} s)"
        if self.code:
            return "FAILED"
        text = _COLOR.sub("", self.log.read_text(errors="replace"))
        lines = [match[0] for match in _LAST.finditer(text)]
        skipped = re.search(r"\d+ skipped", lines[-1]) if lines else None
        if skipped is None:
            return "ok"
        if "passed" in lines[-1]:
            return f"ok, {skipped[0]}"
        reason = _REASON.search(text)
        return f"SKIPPED: {reason[1] if reason else 'no reason given'}"


class Lanes:
    """Run parts, some at a time."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._jobs: set[int] = set()
        self._is_over = False

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts and print them in order. On an exception, such as SystemExit of a signal, end all of them."""
        waiting = iter(parts)
        threads = [threading.Thread(target=self._lane, args=(waiting,)) for _ in range(self._lanes)]
        for thread in threads:
            thread.start()
        try:
            for part in parts:
                print(f"\n=== {part.name}", flush=True)
                self._follow(part)
        finally:
            self._end()
            for thread in threads:
                thread.join()

    def _lane(self, waiting: Iterator[Part]) -> None:
        while (part := self._next(waiting)) is not None:
            began = time.monotonic()
            watched = [sys.executable, str(Path(__file__).with_name("while_moving.py")), f"{SILENCE}:{LONGEST}"]
            code = 1
            try:
                with part.log.open("wb") as log, self._lock:
                    if self._is_over:
                        return
                    process = subprocess.Popen(
                        [*watched, *part.command],
                        env=dict(part.environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                    self._jobs.add(process.pid)
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = code = os.waitstatus_to_exitcode(status)
                part.core_seconds = usage.ru_utime + usage.ru_stime
                with self._lock:
                    self._jobs.discard(process.pid)
            finally:
                part.seconds = time.monotonic() - began
                part.code = code

    def _next(self, waiting: Iterator[Part]) -> Part | None:
        with self._lock:
            return None if self._is_over else next(waiting, None)

    def _follow(self, part: Part) -> None:
        """Print the output of a part until it has ended."""
        while not part.log.exists() and part.code is None:
            time.sleep(0.05)
        with part.log.open("rb") as log:
            has_ended = False
            while not has_ended:
                has_ended = part.code is not None  # before the last look
                sys.stdout.buffer.write(log.read())
                sys.stdout.buffer.flush()
                if not has_ended:
                    time.sleep(0.1)

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            for pid in self._jobs:
                os.kill(pid, 15)  # while_moving.py ends the processes of its command


def summary(parts: Sequence[Part], seconds: float) -> str:
    """Return a line for each part, what computed most, the slowest parts, and those that were skipped entirely."""
    verdicts = [(part, part.verdict()) for part in parts]
    lines = [f"\n=== summary ({seconds:.0f} s, {sum(part.core_seconds for part in parts):.0f} s of a core)"]
    lines += [f"{part.name:<40} {part.seconds:4.0f} s  {verdict}" for part, verdict in verdicts]
    lines += ["\n=== what computed most (s of a core)"]
    by_core = sorted(parts, key=lambda part: -part.core_seconds)
    lines += [f"{part.core_seconds:.0f}\t{part.name}" for part in by_core[:12]]
    lines += ["\n=== slowest parts (s)"]
    by_time = sorted(parts, key=lambda part: -part.seconds)
    lines += [f"{part.seconds:.0f}\t{part.name}" for part in by_time[:5]]
    skipped = [f"{part.name}: {verdict[9:]}" for part, verdict in verdicts if verdict.startswith("SKIPPED")]
    if skipped:
        lines += ["\n=== not tested at all", *skipped]
    return "\n".join(lines)
