"""Device collectives: collectives of a node's ranks on device arrays, queued on the current stream of each rank.

A rank reads another device's memory over the links between the devices, or in shared host memory, without messages and
without the host's cores. Arrays in symmetric memory are used in place; data of other arrays goes through slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from commlib.devices.array import DeviceArray
from commlib.devices.launch_replay import LaunchReplay, queue_once
from commlib.execution.reduce_function import ReduceFunction
from commlib.node.collective import Exchange, Range
from commlib.node.device_board import DeviceBoard
from commlib.transport.base import WaitHook

# Bytes. Up to this size every rank reads all arrays completely: a second barrier would cost more.
SMALL_BYTES = 64 << 10

# Bytes. Shares of an array begin at multiples of this, so devices read full memory lines.
_SHARE_BYTES = 512


class Enqueue(Protocol):
    """Queues the collective on a source and a target, both 1-D. All ranks call it."""

    def __call__(self, x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None: ...


OpenSlots = Callable[[], None]
"""Creates the board's slots, within an operation; the first call is collective."""

Queue = Callable[[Hashable, Callable[[], None]], None]
"""Queues the work of a function, which depends only on a key: see `devices.repeats`."""


def exchange(
    board: DeviceBoard, open_slots: OpenSlots, what: Exchange, op: ReduceFunction | None, *, again: bool = True
) -> Enqueue:
    """Return an exchange: see `node.collective.Exchange`. again: it runs more than once."""
    queue: Queue = LaunchReplay(board.device).queue if again else queue_once

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        if what.offsets is not None and what.nbytes > SMALL_BYTES:
            place, bases = board.find(target if what.in_target else x)
            if board.is_same(place, on_wait) and place:
                if what.in_target:
                    _copy_own(board, what, x, target)
                parts = [base + offset for base, offset in zip(bases, what.offsets, strict=True)]
                board.barrier()
                queue((place, target.address), partial(_take, board, parts, what.takes, 0, what.longest, op, target))
                board.barrier()
                return
        if what.longest:
            open_slots()
            _exchange_in_slots(board, what, op, x, target, queue)

    return move


def all_reduce(board: DeviceBoard, open_slots: OpenSlots, count: int, op: ReduceFunction) -> Enqueue:
    """Return an all-reduce of `count` elements."""
    nbytes = count * op.item_bytes
    everything = Exchange([(0, nbytes)], [(0, nbytes)] * board.size, nbytes)
    if nbytes <= SMALL_BYTES:
        return exchange(board, open_slots, everything, op)
    queue = LaunchReplay(board.device).queue
    # Over the host's bus, each rank reads its share of all arrays and then the others' results: less than all arrays.
    halves = _reduce_in_two_steps(board, open_slots, count, op) if board.by_host and board.size > 2 else None

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        place, bases = board.find(target)
        if board.is_same(place, on_wait) and place:
            if x.address != target.address:
                board.device.copy(target, x)
            _reduce_shares(board, bases, count, op, target.dtype, queue)
            return
        if halves is not None:
            halves(x, target, on_wait)
            return
        open_slots()
        if board.size == 2:  # reading shares would save nothing with two ranks
            _exchange_in_slots(board, everything, op, x, target, queue)
            return
        longest = board.part_bytes(1) // op.item_bytes
        for start in range(0, count, longest):
            stop = min(start + longest, count)
            slots = board.switch_slots()
            mine = board.at(slots[board.rank], stop - start, x.dtype)
            board.device.copy(mine, x[start:stop])
            _reduce_shares(board, slots, stop - start, op, x.dtype, queue)
            board.device.copy(target[start:stop], mine)

    return move


def scan(board: DeviceBoard, open_slots: OpenSlots, count: int, op: ReduceFunction, *, inclusive: bool) -> Enqueue:
    """Return a scan of `count` elements: each rank combines the arrays of all ranks before it; inclusive: and its own.

    A rank that combines no array leaves its target unchanged.
    """
    nbytes = count * op.item_bytes
    everything, queue = Exchange([(0, nbytes)], [(0, nbytes)] * board.size, nbytes), LaunchReplay(board.device).queue

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        if count:
            open_slots()
            _exchange_in_slots(board, everything, op, x, target, queue, first=board.rank + inclusive)

    return move


def _reduce_in_two_steps(board: DeviceBoard, open_slots: OpenSlots, count: int, op: ReduceFunction) -> Enqueue:
    """Return an all-reduce as two exchanges: each rank reduces its share, then all ranks read all shares."""
    size = board.size
    ranges = _ranges([count // size + (rank < count % size) for rank in range(size)], op.item_bytes)
    mine, longest = ranges[board.rank], ranges[0][1]
    reduced = Exchange(ranges, [mine] * size, longest)
    spread = Exchange([mine], ranges, longest)
    first, second = exchange(board, open_slots, reduced, op), exchange(board, open_slots, spread, None)

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        first(x, target, on_wait)
        second(target, target, on_wait)

    return move


def _ranges(counts: Sequence[int], item_bytes: int) -> list[Range]:
    ends = list(accumulate(count * item_bytes for count in counts))
    return [(end - count * item_bytes, count * item_bytes) for end, count in zip(ends, counts, strict=True)]


def _reduce_shares(
    board: DeviceBoard, arrays: Sequence[int], count: int, op: ReduceFunction, dtype: Any, queue: Queue
) -> None:
    """Reduce this rank's share of the arrays at these addresses, and write the result to all of them."""
    share = -(-count * op.item_bytes // board.size // _SHARE_BYTES) * _SHARE_BYTES // op.item_bytes
    start = min(board.rank * share, count)
    mine = min(share, count - start)

    def combine() -> None:
        parts = [board.at(address + start * op.item_bytes, mine, dtype) for address in arrays]
        board.device.kernels.reduce_to(op.dtype, op.operation, op.divisor, parts, parts)

    board.barrier()
    if mine:
        queue((count, *arrays), combine)
    board.barrier()


def _exchange_in_slots(
    board: DeviceBoard,
    what: Exchange,
    op: ReduceFunction | None,
    x: DeviceArray,
    target: DeviceArray,
    queue: Queue,
    *,
    first: int | None = None,
) -> None:
    """Copy the published parts of `x` to this rank's slot and read the parts from the other slots, chunk by chunk.

    first: in a reduction, the number of first ranks whose arrays are combined.
    """
    parts = len(what.sends)
    piece = board.part_bytes(parts)
    own = 0 if parts == 1 else board.rank  # the index of the part for this rank in every slot
    mine = x.address + what.sends[own][0]

    def give(start: int, slot: int) -> None:
        for number, part in enumerate(what.sends):
            length = _bytes_left(part, start, piece)
            if length and (parts == 1 or number != own):
                _copy(board, slot + number * piece, x.address + part[0] + start, length)

    def give_next(start: int) -> tuple[list[int], tuple[int, int, int]]:
        slots = board.switch_slots()
        key = start, slots[board.rank], x.address
        queue(key, partial(give, start, key[1]))
        return slots, key

    def take(start: int, slots: list[int], key: tuple[int, int, int]) -> None:
        sources = [slot + own * piece - start for slot in slots]
        sources[board.rank] = mine
        if first != 0:
            queue((*key, target.address), partial(_take, board, sources[:first], what.takes, start, piece, op, target))

    pending = give_next(0)
    for start in range(0, what.longest, piece):
        board.barrier()
        following, current = start + piece, pending
        if following >= what.longest:
            take(start, *current)
        elif board.by_host:
            # The host's bus is full duplex. The two slots alternate, and if the target is also the source, the next
            # chunk to read is behind the chunk to write.
            pending, event = board.run_on_side_stream(partial(give_next, following))
            take(start, *current)
            board.device.current().wait(event)
        else:
            take(start, *current)
            pending = give_next(following)


def _take(
    board: DeviceBoard,
    sources: Sequence[int],
    takes: Sequence[Range],
    start: int,
    piece: int,
    op: ReduceFunction | None,
    target: DeviceArray,
) -> None:
    """Read this rank's parts from byte `start` on, at most `piece` bytes from each rank, into the target.

    sources: the addresses of each rank's part for this rank.
    """
    if op is not None:
        offset, length = takes[board.rank]
        if length := _bytes_left((offset, length), start, piece):
            count = length // op.item_bytes
            if board.by_host and length > SMALL_BYTES:
                sources = _fetch(board, sources, start, length)
            operands = [board.at(source + start, count, target.dtype) for source in sources]
            into = board.at(target.address + offset + start, count, target.dtype)
            board.device.kernels.reduce(op.dtype, op.operation, op.divisor, operands, into)
        return
    for source, (offset, length) in zip(sources, takes, strict=True):
        if length := _bytes_left((offset, length), start, piece):
            _copy(board, target.address + offset + start, source + start, length)


def _fetch(board: DeviceBoard, sources: Sequence[int], start: int, length: int) -> list[int]:
    """Copy the other ranks' parts to this rank's device, where a kernel reads them several times faster."""
    near = board.near((board.size - 1) * length) - start
    copies = []
    for peer, source in enumerate(sources):
        if peer == board.rank:
            copies.append(source)
        else:
            _copy(board, near + start, source + start, length)
            copies.append(near)
            near += length
    return copies


def _copy_own(board: DeviceBoard, what: Exchange, x: DeviceArray, target: DeviceArray) -> None:
    offset, length = what.takes[board.rank]
    _copy(board, target.address + offset, x.address, length)


def _copy(board: DeviceBoard, to: int, source: int, nbytes: int) -> None:
    if to != source:
        board.device.copy(board.at(to, nbytes, "uint8"), board.at(source, nbytes, "uint8"))


def _bytes_left(part: Range, start: int, piece: int) -> int:
    """Return the bytes of a part from `start` on, at most `piece`."""
    return max(min(part[1] - start, piece), 0)
