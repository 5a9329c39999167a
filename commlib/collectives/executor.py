"""Executor: run the steps of a hierarchical program piece by piece, on the memory of the host or of a device.

A piece has the same part of every chunk of the data, so a slot or a buffer for the network may be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from commlib.execution.streaming import Hook
from commlib.schedule.hierarchy import HierarchicalProgram, NodeStep


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call. start: its first element in every chunk, or in all of the data if each rank has all of it.

    counts: the elements of each chunk in the piece. kind: equal for pieces with equal counts.
    """

    number: int
    start: int
    counts: tuple[int, ...]
    kind: int


class CallMemory(Protocol):
    """The memory with the data of one run of a call: what the steps of the call need."""

    def exchange(self, step: NodeStep, piece: CallPiece) -> None:
        """Run a step of the node."""
        ...

    def finish(self, piece: CallPiece) -> None:
        """Finish what the rail has reduced of a piece, or leave that to the exchange of the result."""
        ...

    def stream(self, prepare: Hook, complete: Hook) -> None:
        """Run the rail's verb on all pieces. `prepare(n)` precedes it for piece n, and `complete(n)` follows."""
        ...


def run(steps: HierarchicalProgram, pieces: Sequence[CallPiece], memory: CallMemory) -> None:
    """Run the pieces of a call. While one crosses the network, the node's ranks prepare the next."""
    memory.stream(partial(_prepare, steps, pieces, memory), partial(_complete, steps, pieces, memory))


def _prepare(steps: HierarchicalProgram, pieces: Sequence[CallPiece], memory: CallMemory, number: int) -> None:
    for step in steps.before:
        memory.exchange(step, pieces[number])


def _complete(steps: HierarchicalProgram, pieces: Sequence[CallPiece], memory: CallMemory, number: int) -> None:
    if steps.rail is not None:
        memory.finish(pieces[number])
    for step in steps.after:
        memory.exchange(step, pieces[number])
