"""Small collectives by messages, set up once: what repeats is then only to start messages and to combine.

The same programs as in `executor`, on a buffer of their own. Posting a message anew costs Python more than a fast
network takes to deliver it, so each round's messages are persistent requests, and each combination's addresses are
written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import NUMPY, Array, name_of
from commlib.kernels.arithmetic import accumulator_dtype, reduce_function
from commlib.schedule.ir import Program, Span
from commlib.schedule.layout import even
from commlib.transport.base import Idle, PreparedRound, Transport

# Above this what Python costs is no longer what counts.
PREPARED_BYTES = 16 << 10


class _Step:
    """One round: its messages, and what is combined when they are there."""

    __slots__ = ("combinations", "keep", "messages")

    def __init__(self, messages: PreparedRound, combinations: list[tuple[int, ...]], keep: list[Any]) -> None:
        self.messages, self.combinations, self.keep = messages, combinations, keep


class PreparedProgram:
    """A program of one region over `buffer` (1-D, contiguous), combined by the compiled function `reduce`."""

    def __init__(
        self, program: Program, buffer: Array, transport: Transport, tag: int, reduce: Callable[..., Any] | None
    ) -> None:
        self._reduce, self._transport = reduce, transport
        layout = even(len(buffer), program.regions[0]) if program.regions else None

        def part(span: Span) -> Any:
            if layout is None:
                return buffer[:0]
            start, stop = layout.slice(span)
            return buffer[start:stop]

        self._steps = []
        for step in program.rounds:
            assert not step.copies
            receives, keep, operands = [], [], {}  # type: ignore[var-annotated]
            for recv in step.recvs:
                place = part(recv.span)
                if recv.reduce:
                    place = np.empty_like(place)
                    operands.setdefault(recv.span, []).append((recv.peer, place))
                receives.append((recv.peer, place.view(np.uint8).data))
                keep.append(place)
            sends = [(send.peer, part(send.span).view(np.uint8).data) for send in step.sends]
            combinations: list[tuple[int, ...]] = []
            for span, arrivals in operands.items():
                target = part(span)
                ordered = sorted([*arrivals, (program.rank, target)], key=lambda operand: operand[0])
                inputs = np.array([address_of(array) for _, array in ordered], np.int64)
                output = np.array([address_of(target)], np.int64)
                keep += [inputs, output]
                combinations.append((address_of(inputs), len(inputs), address_of(output), 1, 0, len(target), 0))
            self._steps.append(_Step(transport.prepare(sends, receives, tag), combinations, keep))

    def run(self, idle: Idle) -> None:
        """Run it once. `idle` is called during long waits, and may raise to give up; it cannot run again then."""
        reduce = self._reduce
        for step in self._steps:
            step.messages.run(idle)
            for combination in step.combinations:
                reduce(*combination)  # type: ignore[misc]


class SmallAllReduce:
    """An all-reduce of `count` elements among the ranks of a transport.

    `operation` is what the kernels call it, `divisor` that of a mean.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        tag: int,
        idle: Idle,
        count: int,
        dtype: Any,
        operation: str,
        divisor: int,
    ) -> None:
        self._idle = idle
        wide = accumulator_dtype(name_of(dtype), operation)
        self._buffer = np.empty(count, NUMPY[wide])
        alone = transport.size == 1  # nothing is combined then, and nothing need be compiled
        combine = None if alone else reduce_function(wide, "sum" if operation == "mean" else operation).ctypes
        self._program = PreparedProgram(program, self._buffer, transport, tag, combine)
        self._divide = reduce_function(wide, operation).ctypes if operation == "mean" and divisor > 1 else None
        self._divisor = divisor
        self._table = np.array([address_of(self._buffer)], np.int64)

    def run(self, x: Array, target: Array) -> None:
        """Reduce `x` into `target`, both of one dimension, or none."""
        self._buffer[:] = x
        self._program.run(self._idle)
        if self._divide is not None:
            table = address_of(self._table)
            self._divide(table, 1, table, 1, 0, len(self._buffer), self._divisor)
        if self._buffer.dtype == target.dtype:
            target[...] = self._buffer
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # overflow is what rounding to a narrow float means
                target[...] = self._buffer
