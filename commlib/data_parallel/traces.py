"""Traces: record in a timeline when buckets are ready, launched and reduced, and when a step's reduction ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any

from commlib.data_parallel.buckets import Bucket
from commlib.observe.journal import journal_of
from commlib.observe.recorder import Mark


class Traces:
    """Records the buckets of one engine in a timeline. `comms` lists the communicator of each bucket's reduction."""

    def __init__(self, buckets: Sequence[Bucket], comms: Sequence[Any]) -> None:
        self._buckets = buckets
        self._journals = [journal_of(comm) for comm in comms]
        self._begun: dict[int, str] = {}  # the open event of each bucket
        self._works: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        """Whether a timeline is written."""
        return bool(self._journals) and self._journals[0].recorder is not None

    def ready(self, index: int) -> None:
        """Record that all gradients of a bucket are complete, and that the bucket is not launched yet."""
        self._begin(index, "ready")

    def launched(self, index: int, work: Any) -> None:
        """Record that a reduction was started; work: its handle, None if the same call completes it."""
        self._end(index, {})
        self._begin(index, "launched")
        self._works[index] = work

    def ended(self) -> None:
        """Record that all buckets are reduced, with the end time from each operation's record, if there is one."""
        for index in list(self._begun):
            record = getattr(self._works.get(index), "record", None)
            self._end(index, {"ended_ns": record.ended} if record is not None and record.ended else {})
        self._works.clear()
        if self._journals:
            self._journals[0].step("gradients")

    def _begin(self, index: int, state: str) -> None:
        bucket = self._buckets[index]
        self._begun[index] = f"bucket {index} {state}"
        self._write(index, "b", {"bytes": bucket.nbytes, "gradients": len(bucket.slots)})

    def _end(self, index: int, facts: Mapping[str, Any]) -> None:
        if index in self._begun:
            self._write(index, "e", facts)
            del self._begun[index]

    def _write(self, index: int, phase: str, facts: Mapping[str, Any]) -> None:
        journal, name = self._journals[index], self._begun[index]
        if journal.recorder is not None and (trace := journal.recorder.trace) is not None:
            trace(Mark(monotonic_ns(), phase, "bucket", name, index, {"comm": journal.name, **facts}))
