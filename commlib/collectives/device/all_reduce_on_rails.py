"""All-reduce of device arrays in groups on several nodes.

Reduce-scatter between the devices of a node, all-reduce of each share between the nodes, all-gather between devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.accumulation import WideAccumulation
from commlib.collectives.device.rails import CallPiece, DeviceRails
from commlib.devices.array import DeviceArray
from commlib.execution.accumulation import wide_bytes
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue, OpenSlots
from commlib.schedule.layout import even
from commlib.transport.base import WaitHook


def all_reduce(board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call) -> Enqueue:
    """Return an all-reduce among all ranks; `board` connects the devices of this node."""
    rails = DeviceRails(board, open_slots, group, call, wide_bytes(call.count, call.dtype, call.op))
    wide = WideAccumulation.of(call.dtype, call.op, group.size)

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        longest = rails.longest(1, 1 / rails.rails, wide.dtype.itemsize)
        rails.run(call.count, longest, partial(_stages, rails, wide, min(longest, call.count), x, target))

    return move


def _stages(
    rails: DeviceRails, wide: WideAccumulation, longest: int, x: DeviceArray, target: DeviceArray, piece: CallPiece
) -> Iterator[None]:
    shares = even(piece.count, rails.rails)
    slots = rails.board.switch_slots()
    rails.put(x[piece.start : piece.stop], rails.at(slots[rails.place], 0, piece.count, wide.dtype))
    rails.synchronize()
    own: Any = None
    if rails.on_rail:
        start, stop = shares.slice_of(rails.place)
        parts = [rails.at(slot, start, stop - start, wide.dtype) for slot in slots]
        own = parts[rails.place]
        wide.combine(parts, own)
        block = own if rails.direct else rails.block(piece, own.size, wide.dtype)
        rails.put(own, block)
    yield
    if rails.on_rail:
        nbytes = -(-longest // rails.rails) * wide.dtype.itemsize  # one algorithm for all pieces
        rails.network("all_reduce", [block], [], op=wide.operation, nbytes=nbytes)
        rails.put(block, own)
        wide.finish(own)
    rails.synchronize()
    for place in range(rails.rails):
        start, stop = shares.slice_of(place)
        share = rails.at(slots[place], start, stop - start, wide.dtype)
        rails.put(share, target[piece.start + start : piece.start + stop])
    rails.synchronize()  # the slots may be reused only after this
