"""Runs one rank's program over one transport: the only interpreter of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.errors import TransportError
from commlib.kernels.arithmetic import reduce_function
from commlib.schedule.ir import Program, Span
from commlib.schedule.layout import Layout
from commlib.transport.base import Idle, Request, Transport


class Reducer:
    """One operation on one dtype, for contiguous 1-D arrays on the host."""

    def __init__(self, dtype: str, operation: str) -> None:
        self._call = reduce_function(dtype, operation).ctypes
        self._inputs, self._output = np.zeros(2, np.int64), np.zeros(1, np.int64)
        self._addresses = self._inputs.ctypes.data, self._output.ctypes.data

    def pair(self, first: Any, second: Any, target: Any) -> None:
        """target = first (operation) second; the target may be one of them."""
        self._inputs[:] = first.ctypes.data, second.ctypes.data
        self._output[0] = target.ctypes.data
        self._call(self._addresses[0], 2, self._addresses[1], 1, 0, len(target), 0)

    def finish(self, array: Any, divisor: int) -> None:
        """Divide a sum in place, if the operation is a mean."""
        self._inputs[0] = self._output[0] = array.ctypes.data
        self._call(self._addresses[0], 1, self._addresses[1], 1, 0, len(array), divisor)


@dataclass(slots=True)
class Region:
    """One region of a program's chunks: a contiguous 1-D array, and where each chunk lies in it."""

    array: Any
    layout: Layout


class _Memory:
    """The chunks of all regions as slices."""

    def __init__(self, program: Program, regions: Sequence[Region]) -> None:
        self._regions: list[tuple[int, int, Region]] = []
        first = 0
        for chunks, region in zip(program.regions, regions, strict=True):
            self._regions.append((first, first + chunks, region))
            first += chunks

    def __getitem__(self, span: Span) -> Any:
        for first, last, region in self._regions:
            if first <= span.start and span.stop <= last and first < last:
                start, stop = region.layout.slice(Span(span.start - first, span.stop - first))
                return region.array[start:stop]
        return np.empty(0, np.uint8)  # an empty span of a program without data


def _bytes(array: Any) -> memoryview:
    return array.view(np.uint8).data  # type: ignore[no-any-return]  # bfloat16 has no buffer format of its own


def execute(
    program: Program,
    regions: Sequence[Region],
    transport: Transport,
    *,
    tag: int,
    idle: Idle,
    reducer: Reducer | None = None,
) -> None:
    """Run `program` on this rank's `regions`.

    All messages carry `tag`; `reducer` combines what arrives for a reducing receive (the lower rank's operand first,
    so that every rank computes the same bits). `idle` is called during long waits and may raise to give up.
    """
    memory = _Memory(program, regions)
    for round_ in program.rounds:
        for copy in round_.copies:
            memory[copy.target][:] = memory[copy.source]
        receives: list[Request] = []
        landed: list[Any] = []
        for recv in round_.recvs:
            target = memory[recv.span]
            landed.append(np.empty_like(target) if recv.reduce else target)
            receives.append(transport.recv(recv.peer, tag, _bytes(landed[-1])))
        sends = [transport.send(send.peer, tag, _bytes(memory[send.span])) for send in round_.sends]
        try:
            transport.wait([*receives, *sends], idle)
        except BaseException:
            for request in (*receives, *sends):
                request.cancel()
            raise
        for recv, incoming, request in zip(round_.recvs, landed, receives, strict=True):
            if request.nbytes != incoming.nbytes:
                raise TransportError(
                    f"{program.verb} {program.algorithm} on rank {program.rank}: expected {incoming.nbytes} bytes from "
                    f"rank {recv.peer}, got {request.nbytes if request.nbytes >= 0 else 'more'}: do the ranks call "
                    "the same thing? COMMLIB_CHECK=always compares every call"
                )
            if recv.reduce and len(incoming):
                assert reducer is not None
                target = memory[recv.span]
                first, second = (incoming, target) if recv.peer < program.rank else (target, incoming)
                reducer.pair(first, second, target)
