"""Memory: the kind of memory that holds a benchmark's arrays. HOST is numpy's; `gpu_memory` has a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from commlib.bench.measure import HOST_TIMER, Call, Timer, memory_pass
from commlib.bench.rows import BOUND_FROM
from commlib.dtypes import NUMPY, Array

Blocks = Sequence[tuple[int, Array]]
"""The contents of an array, as consecutive blocks: the length of each, and the period with which its numbers repeat."""


class BenchMemory(Protocol):
    """Arrays of one kind of memory. Work on them may be queued; `finish` waits for it."""

    @property
    def device(self) -> str:
        """The name of the kind, as in --device."""
        ...

    @property
    def bound_from(self) -> int:
        """Size in bytes from which the memory is a bound of a verb; for less, the overhead of a call is."""
        ...

    def allocate(self, comm: Any, count: int, dtype: str, *, symmetric: bool) -> Any:
        """Return a new 1-D array. Collective if symmetric."""
        ...

    def part(self, array: Any, start: int, count: int) -> Any:
        """Return consecutive elements of an array, which share its memory."""
        ...

    def write(self, array: Any, blocks: Blocks) -> None:
        """Fill an array, and wait until it is filled."""
        ...

    def read(self, array: Any) -> Array:
        """Return an array's contents after all queued work."""
        ...

    def clear(self, array: Any) -> None:
        """Write zeros."""
        ...

    def finish(self) -> None:
        """Wait for the work that is queued on the current stream."""
        ...

    def timer(self, contender: str) -> Timer:
        """Return a new timer for the bursts of a contender."""
        ...

    def has_bound(self, comm: Any, world: Any) -> bool:
        """Return whether this memory bounds the verbs of a communicator. Collective."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return facts about this memory for a record, by the name of its kind; empty for the host's."""
        ...

    def traffic(self, read: int, written: int, replaces: bool) -> Call:
        """Return a call that moves so many bytes once, as fast as this memory allows: the bound. See `memory_pass`."""
        ...


class NumpyMemory:
    """Arrays of numpy. All work on them is complete when a call returns."""

    device = "host"
    bound_from = BOUND_FROM

    def allocate(self, comm: Any, count: int, dtype: str, *, symmetric: bool) -> Array:
        array: Array = comm.empty(count, dtype) if symmetric else np.empty(count, NUMPY[dtype])
        return array

    def part(self, array: Array, start: int, count: int) -> Array:
        return array[start : start + count]

    def write(self, array: Array, blocks: Blocks) -> None:
        start = 0
        for length, period in blocks:
            array[start : start + length] = np.resize(period, length)
            start += length

    def read(self, array: Array) -> Array:
        return array

    def clear(self, array: Array) -> None:
        array[...] = 0

    def finish(self) -> None:
        pass

    def timer(self, contender: str) -> Timer:
        return HOST_TIMER

    def has_bound(self, comm: Any, world: Any) -> bool:
        return bool(comm.one_node and comm.size > 1)

    def facts(self) -> dict[str, Any]:
        return {}

    def traffic(self, read: int, written: int, replaces: bool) -> Call:
        return memory_pass(read, written, replaces)


HOST = NumpyMemory()
