"""DeviceCollective: collectives of a node's ranks on arrays of their devices, queued on the current stream of each.

What a rank reads of another's device it reads over the wires between the devices, or in the memory that they share; no
message and no host is in between. Where the arrays are in symmetric memory nothing is copied; elsewhere the data goes
through slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.devices.repeats import Repeats, once
from commlib.execution.reduce_op import ReduceOp
from commlib.node.collective import Exchange, Range
from commlib.node.device_board import DeviceBoard
from commlib.transport.base import WaitHook

# Up to so many bytes every rank reads all of every other one's array: a meeting costs more than that.
SMALL_BYTES = 64 << 10

# Shares of an array begin at multiples of so many bytes, where memory is read in whole lines.
_SHARE_BYTES = 512

Move = Callable[[DeviceArray, DeviceArray, WaitHook], None]
"""Queue a call on a source and a target, both 1-D. All ranks do."""

Open = Callable[[], None]
"""Make the board's slots, within an operation; collective at first."""

Queue = Callable[[Hashable, Callable[[], None]], None]
"""Queue what a function does, which depends on a key: see `devices.repeats`."""


def exchange(board: DeviceBoard, open_slots: Open, what: Exchange, op: ReduceOp | None, *, again: bool = True) -> Move:
    """Return an exchange: see `node.collective.Exchange`. again: it is used more than once."""
    queue: Queue = Repeats(board.device).queue if again else once

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        if what.offsets is not None and what.nbytes > SMALL_BYTES:
            place, bases = board.find(target if what.in_target else x)
            if board.is_same(place, on_wait) and place:
                if what.in_target:
                    _copy_own(board, what, x, target)
                parts = [base + offset for base, offset in zip(bases, what.offsets, strict=True)]
                board.meet()
                queue((place, target.address), partial(_take, board, parts, what.takes, 0, what.longest, op, target))
                board.meet()
                return
        if what.longest:
            open_slots()
            _through_slots(board, what, op, x, target, queue)

    return move


def all_reduce(board: DeviceBoard, open_slots: Open, count: int, op: ReduceOp) -> Move:
    """Return an all-reduce of `count` elements."""
    nbytes = count * op.item_bytes
    everything = Exchange([(0, nbytes)], [(0, nbytes)] * board.size, nbytes)
    if nbytes <= SMALL_BYTES:
        return exchange(board, open_slots, everything, op)
    queue = Repeats(board.device).queue
    # Who reads over the host's bus reads its share of all arrays, and the others' results, not all of all arrays.
    halves = _by_shares(board, open_slots, count, op) if board.by_host and board.size > 2 else None

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
        if board.size == 2:  # half of the other one's array is read in either case
            _through_slots(board, everything, op, x, target, queue)
            return
        longest = board.part_bytes(1) // op.item_bytes
        for start in range(0, count, longest):
            stop = min(start + longest, count)
            slots = board.turn_slots()
            mine = board.at(slots[board.rank], stop - start, x.dtype)
            board.device.copy(mine, x[start:stop])
            _reduce_shares(board, slots, stop - start, op, x.dtype, queue)
            board.device.copy(target[start:stop], mine)

    return move


def scan(board: DeviceBoard, open_slots: Open, count: int, op: ReduceOp, *, inclusive: bool) -> Move:
    """Return a scan of `count` elements: each rank combines the arrays of those before it, and its own if `inclusive`.

    A rank that combines none leaves its target as it is.
    """
    nbytes = count * op.item_bytes
    everything, queue = Exchange([(0, nbytes)], [(0, nbytes)] * board.size, nbytes), Repeats(board.device).queue

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        if count:
            open_slots()
            _through_slots(board, everything, op, x, target, queue, first=board.rank + inclusive)

    return move


def _by_shares(board: DeviceBoard, open_slots: Open, count: int, op: ReduceOp) -> Move:
    """Return an all-reduce of two exchanges: each rank reduces its share, then all take all shares."""
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
    board: DeviceBoard, arrays: Sequence[int], count: int, op: ReduceOp, dtype: Any, queue: Queue
) -> None:
    """Reduce all ranks' arrays at these addresses, each its share, and write that to all of them."""
    share = -(-count * op.item_bytes // board.size // _SHARE_BYTES) * _SHARE_BYTES // op.item_bytes
    start = min(board.rank * share, count)
    mine = min(share, count - start)

    def combine() -> None:
        parts = [board.at(address + start * op.item_bytes, mine, dtype) for address in arrays]
        board.device.kernels.reduce_to(op.dtype, op.operation, op.divisor, parts, parts)

    board.meet()
    if mine:
        queue((count, *arrays), combine)
    board.meet()


def _through_slots(
    board: DeviceBoard,
    what: Exchange,
    op: ReduceOp | None,
    x: DeviceArray,
    target: DeviceArray,
    queue: Queue,
    *,
    first: int | None = None,
) -> None:
    """Copy what others take of `x` to this rank's slot, and take from theirs, piece by piece.

    first: of a reduction, only those of the first ranks, so many.
    """
    parts = len(what.sends)
    piece = board.part_bytes(parts)
    own = 0 if parts == 1 else board.rank  # the number of the part that this rank takes, of everyone's
    mine = x.address + what.sends[own][0]

    def give(start: int, slot: int) -> None:
        for number, sent in enumerate(what.sends):
            length = _left(sent, start, piece)
            if length and (parts == 1 or number != own):
                _copy(board, slot + number * piece, x.address + sent[0] + start, length)

    def give_next(start: int) -> tuple[list[int], tuple[int, int, int]]:
        slots = board.turn_slots()
        key = start, slots[board.rank], x.address
        queue(key, partial(give, start, key[1]))
        return slots, key

    def take(start: int, slots: list[int], key: tuple[int, int, int]) -> None:
        sources = [slot + own * piece - start for slot in slots]
        sources[board.rank] = mine
        if first != 0:
            queue((*key, target.address), partial(_take, board, sources[:first], what.takes, start, piece, op, target))

    given = give_next(0)
    for start in range(0, what.longest, piece):
        board.meet()
        following, there = start + piece, given
        if following >= what.longest:
            take(start, *there)
        elif board.by_host:
            # The host's bus carries both ways at once. The slots take turns, and a target that is the source, too, is
            # written in front of what is read of it.
            given, event = board.beside(partial(give_next, following))
            take(start, *there)
            board.device.current().wait(event)
        else:
            take(start, *there)
            given = give_next(following)


def _take(
    board: DeviceBoard,
    sources: Sequence[int],
    takes: Sequence[Range],
    start: int,
    piece: int,
    op: ReduceOp | None,
    target: DeviceArray,
) -> None:
    """Read what this rank takes from byte `start` on, at most `piece` bytes of each rank, into the target.

    sources: where what each rank has for this one begins.
    """
    if op is not None:
        offset, length = takes[board.rank]
        if length := _left((offset, length), start, piece):
            count = length // op.item_bytes
            if board.by_host and length > SMALL_BYTES:
                sources = _fetched(board, sources, start, length)
            operands = [board.at(source + start, count, target.dtype) for source in sources]
            into = board.at(target.address + offset + start, count, target.dtype)
            board.device.kernels.reduce(op.dtype, op.operation, op.divisor, operands, into)
        return
    for source, (offset, length) in zip(sources, takes, strict=True):
        if length := _left((offset, length), start, piece):
            _copy(board, target.address + offset + start, source + start, length)


def _fetched(board: DeviceBoard, sources: Sequence[int], start: int, length: int) -> list[int]:
    """Copy what others have for this rank to its device, where a kernel reads it several times as fast."""
    near = board.near((board.size - 1) * length) - start
    found = []
    for peer, source in enumerate(sources):
        if peer == board.rank:
            found.append(source)
        else:
            _copy(board, near + start, source + start, length)
            found.append(near)
            near += length
    return found


def _copy_own(board: DeviceBoard, what: Exchange, x: DeviceArray, target: DeviceArray) -> None:
    offset, length = what.takes[board.rank]
    _copy(board, target.address + offset, x.address, length)


def _copy(board: DeviceBoard, to: int, source: int, nbytes: int) -> None:
    if to != source:
        board.device.copy(board.at(to, nbytes, "uint8"), board.at(source, nbytes, "uint8"))


def _left(part: Range, start: int, piece: int) -> int:
    """Return how many bytes of a part there are from `start` on, at most `piece`."""
    return max(min(part[1] - start, piece), 0)
