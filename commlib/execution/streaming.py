"""Streaming: run one rank's program over one transport, on data of any size.

Large data is cut into blocks, and the program runs over several blocks at once, each at a different round: while
messages of one block are in flight, another block is combined, and messages of a third are sent.
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
from commlib.execution.reduce_function import ReduceFunction
from commlib.schedule.ir import Program, Recv, Round, Span
from commlib.schedule.layout import Layout, Slices
from commlib.transport.base import Request, Transport, WaitHook

# Blocks in flight at once: one is sent, one arrives, one is combined, and the others absorb the jitter of hosts that
# share their cores (on links of 1 Gbit/s, 4 blocks reached 72 to 87 % of the rate, 8 reached 85 to 96 %).
WINDOW = 8

Hook = Callable[[int], None]
Posted = Callable[[int, int], None]
"""Called with (block, round), both from 0, once the messages of a round are posted."""


def do_nothing(number: int) -> None:
    pass


@dataclass(slots=True)
class Region:
    """One region of a program's chunks: a contiguous 1-D array of any device, and the layout of the chunks in it."""

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


class _ReceiveBuffers:
    """Receive buffers for data to combine, reused from block to block."""

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
    """Return an array as a transport accepts it: a memoryview, or a Buffer of a device."""
    data = array.view(np.uint8)  # bfloat16 has no buffer format
    return data if type(data) is DeviceArray else data.data


class _Block:
    """One block of the data that runs through the program."""

    def __init__(
        self,
        program: Program,
        regions: Sequence[Region],
        transport: Transport,
        tag: int,
        reduce_op: ReduceFunction | None,
        posted: Hook | None,
        on_wait: WaitHook,
    ) -> None:
        self._device, self._on_wait = device_of(regions[0].array) if regions else HOST, on_wait
        self._program, self._transport, self._tag, self._reduce_op = program, transport, tag, reduce_op
        self._memory = _Memory(program, regions)
        self._rounds, self._posted, self._numbers = iter(program.rounds), posted, count()
        self._arrivals: list[tuple[Recv, Any, Request]] = []
        self.pending: list[Request] = []

    def advance(self, landing: _ReceiveBuffers) -> bool:
        """Combine the arrived data and post the next round; return whether there are messages to wait for."""
        self._combine(landing)
        for step in self._rounds:
            self._post(step, landing)
            if self.pending:
                return True
        return False

    def _post(self, step: Round, landing: _ReceiveBuffers) -> None:
        memory, transport, tag = self._memory, self._transport, self._tag
        for copy in step.copies:
            memory[copy.target][:] = memory[copy.source]
        if self._device is not HOST:  # queued work may still read the receive buffers or write the send buffers
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

    def _combine(self, landing: _ReceiveBuffers) -> None:
        operands: dict[Span, list[tuple[int, Any]]] = {}
        for recv, incoming, request in self._arrivals:
            if request.nbytes != incoming.nbytes:
                raise TransportError(
                    f"{self._program.verb} {self._program.algorithm} on rank {self._program.rank}: expected "
                    f"{incoming.nbytes} bytes from rank {recv.peer}, got "
                    f"{request.nbytes if request.nbytes >= 0 else 'more'}: do the ranks make the same calls? "
                    "COMMLIB_CHECK=always compares every call"
                )
            if recv.reduce and len(incoming):
                operands.setdefault(recv.span, []).append((recv.peer, incoming))
        for span, incoming_ones in operands.items():
            assert self._reduce_op is not None
            target = self._memory[span]
            # Ordered by rank: every rank adds the same numbers in the same order.
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
    reduce_op: ReduceFunction | None = None,
    before: Hook = do_nothing,
    after: Hook = do_nothing,
    posted: Posted | None = None,
) -> None:
    """Run `program` over this rank's `blocks`. Each block is the list of regions that hold its chunks.

    All messages of block i carry `tag + i`. For reducing receives `reduce_op` combines the arrived data with the local
    data (the lowest rank's operand first, so every rank computes the same bits). `on_wait` is called during long waits
    and may raise to give up. `before(i)` is called before block i begins, `after(i)` when block i and all earlier
    blocks have ended. Their order depends only on the number of blocks: before(0) ... before(WINDOW - 1), after(0),
    before(WINDOW), after(1), and so on. So they may be collective.
    """
    landing = _ReceiveBuffers()
    running: dict[int, _Block] = {}
    started = ended = 0
    try:
        while ended < len(blocks):
            if started < len(blocks) and started < ended + WINDOW:
                before(started)
                on_posted = posted and partial(posted, started)
                block = _Block(program, blocks[started], transport, tag + started, reduce_op, on_posted, on_wait)
                running[started] = block
                if not block.advance(landing):
                    del running[started]
                started += 1
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
