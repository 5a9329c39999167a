"""Persistent collectives: small collectives by messages, set up once; a call only starts messages and combines.

They run the programs of `streaming` on a fixed buffer. In Python, posting a message takes longer than a fast network
needs to deliver it. So the messages of each round are persistent requests, and each combination's addresses are
prepared. Their tags cannot change between calls, so every message ends with a *mark*: the call history hash of its
sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import NUMPY, Array, accumulator_dtype
from commlib.execution.reduce_function import Combination, ReduceFunction
from commlib.execution.rounds import MessageRound, Rounds
from commlib.execution.streaming import Posted
from commlib.kernels.fields.arrays import are_where_expected
from commlib.kernels.machine_code import entry_point
from commlib.schedule.ir import Program, Span
from commlib.schedule.layout import even
from commlib.transport.base import Transport, WaitHook

# Bytes. For larger arrays Python's overhead is no longer dominant.
PERSISTENT_BYTES = 16 << 10

# These take nanoseconds, so they keep the GIL.
_combine = entry_point("reduce.reduce_as_written", holds_lock=True)
_are_equal = entry_point("node.all_equal", holds_lock=True)
_copy_from_array = entry_point("node.copy_from_array", 3, holds_lock=True)
_copy_to_array = entry_point("node.copy_to_array", 3, holds_lock=True)
_ARRAYS_ARE_WHERE_EXPECTED = are_where_expected()


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data


class PersistentProgram:
    """A program of one region over `buffer` (1-D, contiguous), with persistent messages, combined by `reduce_op`.

    mark: one int64 that every message carries. then: combinations after the last round.
    """

    def __init__(
        self,
        program: Program,
        buffer: Array,
        transport: Transport,
        tag: int,
        reduce_op: ReduceFunction,
        mark: Array,
        then: Sequence[Combination] = (),
    ) -> None:
        own_mark = _bytes(mark)
        self._marks = np.zeros(max(1, sum(len(step.recvs) for step in program.rounds)), np.int64)
        self._marks_written = np.array([address_of(self._marks), len(self._marks), address_of(mark)], np.int64)
        self._mark = mark
        self._marks_at = address_of(self._marks_written) if any(step.recvs for step in program.rounds) else 0
        marks = iter(range(len(self._marks)))
        layout = even(len(buffer), program.regions[0]) if program.regions else None

        def part(span: Span) -> Any:
            if layout is None:
                return buffer[:0]
            start, stop = layout.slice(span)
            return buffer[start:stop]

        self._rounds, self._keep = list[MessageRound](), list[Any]()
        for step in program.rounds:
            assert not step.copies
            receives, operands = [], {}  # type: ignore[var-annotated]
            for recv in step.recvs:
                place = part(recv.span)
                if recv.reduce:
                    place = np.empty_like(place)
                    operands.setdefault(recv.span, []).append((recv.peer, place))
                here = next(marks)
                receives.append((recv.peer, (_bytes(place), _bytes(self._marks[here : here + 1]))))
                self._keep.append(place)
            sends = [(send.peer, (_bytes(part(send.span)), own_mark)) for send in step.sends]
            combinations = []
            for span, arrivals in operands.items():
                target = part(span)
                ordered = sorted([*arrivals, (program.rank, target)], key=lambda operand: operand[0])
                combinations.append(reduce_op.bind([array for _, array in ordered], target))
            if step is program.rounds[-1]:
                combinations += then
            messages = transport.persistent_round(sends, receives, tag)
            self._rounds.append(MessageRound(messages, [combination.address for combination in combinations]))
            self._keep.append(combinations)
        functions = transport.functions
        self.compiled = None if functions is None else Rounds(self._rounds, functions, self._marks_at, buffer)

    def run(self, on_wait: WaitHook, posted: Posted | None = None) -> bool:
        """Run it once, and return whether all messages carried this rank's mark.

        `on_wait` is called during long waits, and may raise to give up; the program cannot run again then. `posted` is
        called before the messages of each round start, because their start and the wait are one call.
        """
        if posted is None and self.compiled is not None:
            return self.compiled.run(on_wait)
        for number, (messages, addresses) in enumerate(self._rounds):
            if posted is not None:
                posted(0, number)
            messages.run(on_wait)
            for address in addresses:
                _combine(address)
        return self._marks_at == 0 or bool(_are_equal(self._marks_at))


class PersistentAllReduce:
    """An all-reduce of `count` elements in steps that work on one buffer, in the dtype of accumulation."""

    def __init__(self, reduce_op: ReduceFunction, count: int) -> None:
        operation = reduce_op.operation
        wide = accumulator_dtype(reduce_op.dtype, operation)
        self.combine = ReduceFunction(wide, "sum" if operation == "mean" else operation)
        self._divide = ReduceFunction(wide, operation, reduce_op.divisor) if operation == "mean" else None
        self._whole: Callable[[int, int], bool] | None = None  # the whole call, if one compiled function runs it
        self.buffer = np.empty(count, NUMPY[wide])
        self._mark = np.zeros(1, np.int64)
        self._steps: list[Callable[..., Any]] = []
        self._exchanges: list[Callable[..., Any]] = []  # the steps that accept a `Posted`
        self._at, self._nbytes = address_of(self.buffer), self.buffer.nbytes
        self._copies_bytes = _ARRAYS_ARE_WHERE_EXPECTED and wide == reduce_op.dtype

    def then(self, step: Callable[[], Any]) -> None:
        """Add a step. A step that returns False ends the run: its messages belonged to a different call."""
        self._steps.append(step)
        self._whole = None

    def add_messages(self, program: Program, transport: Transport, tag: int, on_wait: WaitHook) -> None:
        """Add a step that combines the buffers of a transport's ranks, and divides if the operation is a mean."""
        divide = self._divide
        then = [] if divide is None or divide.divisor == 1 else [divide.bind([self.buffer], self.buffer)]
        messages = PersistentProgram(program, self.buffer, transport, tag, self.combine, self._mark, then)
        exchange = partial(messages.run, on_wait)
        self._exchanges.append(exchange)
        self.then(exchange)
        if self._copies_bytes and len(self._steps) == 1 and messages.compiled is not None:
            self._whole = partial(messages.compiled.run, on_wait)

    def run(self, x: Array, target: Array, mark: int, posted: Posted | None = None) -> bool:
        """Reduce `x` into `target`, both contiguous, and return True; if marks differ, leave `target` and return False.

        mark: the same on all ranks if they have made the same calls. posted: called for each round.
        """
        self._mark[0] = mark
        if posted is None and self._whole is not None:
            return self._whole(id(x), id(target))
        if self._copies_bytes:
            _copy_from_array(self._at, id(x), self._nbytes)
        else:
            self.buffer[:] = x.reshape(-1)
        for step in self._steps if posted is None else self._with_callback(posted):
            if step() is False:
                return False
        if self._copies_bytes:
            _copy_to_array(id(target), self._at, self._nbytes)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # rounding to a narrow float may overflow
                target.reshape(-1)[:] = self.buffer
        return True

    def _with_callback(self, posted: Posted) -> Iterator[Callable[[], Any]]:
        for step in self._steps:
            yield partial(step, posted) if step in self._exchanges else step
