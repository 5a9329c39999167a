"""Made-up timelines for tests: ranks' actions at times that a test chooses, written by the real writer's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOOT = "a-boot"


class RankTimeline:
    """The timeline of one rank. Times are ms of the common clock; the file has them in the rank's own clock.

    ahead: ms that the rank's clock is ahead, or a function of the time.
    """

    def __init__(self, rank: int, *, clock: str = BOOT, ahead: Any = 0.0, host: str = "here", process: int = 0) -> None:
        self.rank, self._clock, self._host, self._process = rank, clock, host, process or 1000 + rank
        self._ahead = ahead if callable(ahead) else lambda time: ahead
        self.start = self.own(0)
        """ns of this rank's clock at which its file begins."""
        self._events: list[tuple[float, dict[str, Any]]] = []
        self.lines: list[dict[str, Any]] = []
        for row, (name, calls) in enumerate((("world", "world"), ("pipeline", ""), ("codec", ""), ("steps", ""))):
            self._record("thread_name", {"name": name, "calls": calls}, tid=row)

    def own(self, time: float) -> int:
        """Return the time of this rank's clock in ns."""
        return 500_000_000_000 + round((time + float(self._ahead(time))) * 1e6)

    def clock(self, time: float, *, error: float = 0.01, wrong: float = 0.0, to: int = 0) -> None:
        """Record a measurement of the clock at a time; wrong: its deviation from the truth, within the error."""
        facts = {
            "time_ns": self.own(time),
            "offset_ns": round((wrong - self._ahead(time)) * 1e6),
            "error_ns": round(error * 1e6),
        }
        self._record("commlib_clock", facts | {"to": to})

    def blocking(
        self, verb: str, number: int, began: float, ended: float, *, nbytes: int = 100, text: str = ""
    ) -> None:
        facts = {"call": text or f"{verb} of x", "group": "world", "sequence": number, "bytes": nbytes}
        self._at(began, {"ph": "B", "tid": 0, "name": verb, "args": facts})
        self._at(ended, {"ph": "E", "tid": 0, "args": {"exposed": True}})

    def started(
        self,
        verb: str,
        number: int,
        queued: float,
        began: float,
        ended: float,
        waits: tuple[float, float] | None = None,
    ) -> None:
        """Add an operation of the queue, and the time span in which it is waited for."""
        facts = {"call": f"{verb} of x", "group": "world", "sequence": number, "bytes": 10_000}
        queue = {"tid": 0, "cat": "queue", "id": number, "name": f"queued {verb}", "args": facts}
        self._at(queued, {"ph": "b", **queue})
        self._at(began, {"ph": "e", **queue})
        self._at(began, {"ph": "B", "tid": 0, "name": verb, "args": facts})
        self._at(ended, {"ph": "E", "tid": 0, "args": {}})
        if waits is not None:
            wait = {"tid": 4, "cat": "wait", "id": "wait 1", "name": verb}
            self._at(waits[0], {"ph": "b", **wait, "args": {"calls": "world", "sequence": number, "operation": number}})
            self._at(waits[1], {"ph": "e", **wait, "args": {}})

    def span(self, category: str, name: str, began: float, ended: float, **facts: Any) -> None:
        row = {"pipeline": 1, "codec": 2}[category]
        self._at(began, {"ph": "B", "tid": row, "cat": category, "name": name, "args": facts})
        self._at(ended, {"ph": "E", "tid": row, "cat": category, "name": name, "args": {}})

    def step(self, time: float) -> None:
        self._at(time, {"ph": "i", "s": "p", "tid": 3, "cat": "step", "name": "step", "args": {"by": "user"}})

    def load(self, layer: str, *numbers: int) -> None:
        args = {str(place): number for place, number in enumerate(numbers)}
        self._at(0, {"ph": "C", "tid": 0, "name": f"load of {layer}", "args": args})

    def write(self, path: Path, *, head: bool = True, end: bool = True) -> str:
        """Write the file, and return its name."""
        facts = {"format": 1, "host": self._host, "clock": self._clock, "process": self._process}
        facts |= {"start_ns": self.start, "wall_ns": 1_700_000_000_000_000_000}
        lines = [{"ph": "M", "pid": self.rank, "name": "commlib", "args": facts}] * head
        events = sorted(self._events, key=lambda pair: pair[0])
        lines += [*self.lines, *(event for _, event in events)]
        text = "[\n" + "".join(f"{json.dumps(line)},\n" for line in lines)
        name = {"ph": "M", "pid": self.rank, "name": "process_name", "args": {"name": f"rank {self.rank}"}}
        path.write_text(text + f"{json.dumps(name)}\n]\n" if end else text)
        return str(path)

    def _at(self, time: float, event: dict[str, Any]) -> None:
        ts = (self.own(time) - self.start) / 1e3
        self._events.append((ts, {"pid": self.rank, "ts": ts, **event}))

    def _record(self, name: str, facts: dict[str, Any], **more: int) -> None:
        self.lines.append({"ph": "M", "pid": self.rank, "name": name, "args": facts, **more})
