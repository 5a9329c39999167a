"""Run one rank's program over one transport, on data of any size.

Large data is cut into blocks, and the program runs over several of them at once, each at its own round: while one
block's messages are under way, another's are combined and the next one's leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, empty_like
from commlib.devices.host import HOST
from commlib.devices.waiting import wait_for
from commlib.errors import TransportError
from commlib.execution.reduce_op import ReduceOp
from commlib.schedule.ir import Program, Recv, Round, Span
from commlib.schedule.layout import Layout, Slices
from commlib.transport.base import Request, Transport, WaitHook

# Blocks under way at once: one that is sent, one that arrives, one that is combined, and as many more for the jitter of
# hosts that share their cores (on links of 1 Gbit/s 4 reached 72 to 87 % of the rate, 8 reached 85 to 96 %).
WINDOW = 8

Hook = Callable[[int], None]
Posted = Callable[[int, int], None]
"""Told of each round whose messages have been posted: of which block, and which round, both from 0."""


def nothing(number: int) -> None:
    pass


@dataclass(slots=True)
class Region:
    """One region of a program's chunks: a contiguous 1-D array of any device, and where each chunk lies in it."""

    array: Any
    layout: Layout | Slices


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


class _Landing:
    """Memory for what arrives to be combined, used again by block after block."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self, like: Any) -> Any:
        for index, memory in enumerate(self._free):
            if memory.nbytes >= like.nbytes:
                del self._free[index]
                break
        else:
            memory = empty_like(like, like.nbytes, np.uint8)
        return memory[: like.nbytes].view(like.dtype)

    def give_back(self, array: Any) -> None:
        if type(array) is DeviceArray:
            self._free.append(array.view(np.uint8))
        else:
            self._free.append(array.base if array.base is not None else array)


def _bytes(array: Any) -> Any:
    """Return what a transport takes: a memoryview, or a Buffer of a device."""
    data = array.view(np.uint8)  # bfloat16 has no buffer format of its own
    return data if type(data) is DeviceArray else data.data


class _Block:
    """One block of the data on its way through the program."""

    def __init__(
        self,
        program: Program,
        regions: Sequence[Region],
        transport: Transport,
        tag: int,
        reduce_op: ReduceOp | None,
        posted: Hook | None,
        on_wait: WaitHook,
    ) -> None:
        self._device, self._on_wait = device_of(regions[0].array) if regions else HOST, on_wait
        self._program, self._transport, self._tag, self._reduce_op = program, transport, tag, reduce_op
        self._memory = _Memory(program, regions)
        self._rounds, self._posted, self._numbers = iter(program.rounds), posted, count()
        self._arrivals: list[tuple[Recv, Any, Request]] = []
        self.pending: list[Request] = []

    def advance(self, landing: _Landing) -> bool:
        """Combine what has arrived and post the next round; return whether there is one to wait for."""
        self._combine(landing)
        for step in self._rounds:
            self._post(step, landing)
            if self.pending:
                return True
        return False

    def _post(self, step: Round, landing: _Landing) -> None:
        memory, transport, tag = self._memory, self._transport, self._tag
        for copy in step.copies:
            memory[copy.target][:] = memory[copy.source]
        if self._device is not HOST:  # what was queued may still read where messages arrive, or write what they take
            wait_for(self._device.current().record(), self._on_wait)
        for recv in step.recvs:
            place = memory[recv.span]
            if recv.reduce:
                place = landing.take(place)
            self._arrivals.append((recv, place, transport.recv(recv.peer, tag, _bytes(place))))
        sends = [transport.send(send.peer, tag, _bytes(memory[send.span])) for send in step.sends]
        self.pending = [*(request for _, _, request in self._arrivals), *sends]
        if self._posted is not None:
            self._posted(next(self._numbers))

    def _combine(self, landing: _Landing) -> None:
        operands: dict[Span, list[tuple[int, Any]]] = {}
        for recv, incoming, request in self._arrivals:
            if request.nbytes != incoming.nbytes:
                raise TransportError(
                    f"{self._program.verb} {self._program.algorithm} on rank {self._program.rank}: expected "
                    f"{incoming.nbytes} bytes from rank {recv.peer}, got "
                    f"{request.nbytes if request.nbytes >= 0 else 'more'}: do the ranks call the same thing? "
                    "COMMLIB_CHECK=always compares every call"
                )
            if recv.reduce and len(incoming):
                operands.setdefault(recv.span, []).append((recv.peer, incoming))
        for span, incoming_ones in operands.items():
            assert self._reduce_op is not None
            target = self._memory[span]
            # By rank, so that the same numbers are added in the same order wherever it is done.
            ordered = sorted([*incoming_ones, (self._program.rank, target)], key=lambda operand: operand[0])
            self._reduce_op.combine([array for _, array in ordered], target)
        for recv, incoming, _ in self._arrivals:
            if recv.reduce:
                landing.give_back(incoming)
        self._arrivals.clear()

    def cancel(self) -> None:
        for request in self.pending:
            request.cancel()


def execute(
    program: Program,
    blocks: Sequence[Sequence[Region]],
    transport: Transport,
    *,
    tag: int,
    on_wait: WaitHook,
    reduce_op: ReduceOp | None = None,
    before: Hook = nothing,
    after: Hook = nothing,
    posted: Posted | None = None,
) -> None:
    """Run `program` over this rank's `blocks`: for each the regions that hold its chunks.

    All messages of block i carry `tag + i`; `reduce_op` combines what arrives for reducing receives with what is there
    (the lowest rank's operand first, so that every rank computes the same bits). `on_wait` is called during long waits
    and may raise to give up. `before(i)` is called before block i begins, `after(i)` when it and all before it have
    ended, both in an order that depends on the number of blocks alone: before(0) ... before(WINDOW - 1), after(0),
    before(WINDOW), after(1), and so on. So they may be collective.
    """
    landing = _Landing()
    running: dict[int, _Block] = {}
    begun = ended = 0
    try:
        while ended < len(blocks):
            if begun < len(blocks) and begun < ended + WINDOW:
                before(begun)
                told = posted and partial(posted, begun)
                block = _Block(program, blocks[begun], transport, tag + begun, reduce_op, told, on_wait)
                running[begun] = block
                if not block.advance(landing):
                    del running[begun]
                begun += 1
            elif ended not in running:
                after(ended)
                ended += 1
            else:
                arrived = transport.wait_any(
                    [request for block in running.values() for request in block.pending], on_wait
                )
                for number, block in list(running.items()):
                    block.pending = [request for request in block.pending if request not in arrived]
                    if not block.pending and not block.advance(landing):
                        del running[number]
    except BaseException:
        for block in running.values():
            block.cancel()
        raise
