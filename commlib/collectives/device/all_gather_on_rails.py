"""All-gather of device arrays in groups on several nodes.

The devices of a node copy from each other. Each rail sends the arrays of its ranks on this node to the other nodes.
The devices of those nodes copy them from the slot of the rail.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from commlib.collectives.call import Call
from commlib.collectives.device.rails import CallPiece, DeviceRails
from commlib.devices.array import DeviceArray
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue, OpenSlots
from commlib.transport.base import WaitHook


def all_gather(board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call) -> Enqueue:
    """Return an all-gather among all ranks; `board` connects the devices of this node."""
    rails = DeviceRails(board, open_slots, group, call, call.nbytes * group.size)
    on_a_rail = sum(map(len, rails.members(0)))

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        longest = rails.longest(on_a_rail, on_a_rail, call.dtype.itemsize)
        rails.run(call.count, longest, partial(_stages, rails, call, x, target))

    return move


def _stages(rails: DeviceRails, call: Call, x: DeviceArray, target: DeviceArray, piece: CallPiece) -> Iterator[None]:
    count, dtype, here, rank = piece.count, call.dtype, rails.number, rails.group.rank
    counts = [count] * rails.group.size

    def result(rank: int) -> DeviceArray:
        return target[rank * call.count + piece.start : rank * call.count + piece.stop]

    slots = rails.board.switch_slots()
    rails.put(x[piece.start : piece.stop], rails.at(slots[rails.place], 0, count, dtype))
    rails.put(x[piece.start : piece.stop], result(rank))
    rails.synchronize()
    for slot, other in zip(slots, rails.ranks, strict=True):
        if other != rank:
            rails.put(rails.at(slot, 0, count, dtype), result(other))
    if rails.on_rail:
        layout = rails.by_node(rails.place, counts)
        block = rails.block(piece, layout.count, dtype)
        start, stop = layout.slice_of(here)
        for index, member in enumerate(rails.on_same_rail(here, rails.place)):
            rails.put(result(member), block[start + index * count : start + (index + 1) * count])
    yield
    slots = rails.board.switch_slots()
    if rails.on_rail:
        rails.network("all_gather", [block], [layout])
        for first, last in ((0, start), (stop, layout.count)):  # all received chunks
            rails.put(block[first:last], rails.at(slots[rails.place], first, last - first, dtype))
    rails.synchronize()
    for rail in range(rails.rails):
        offsets = rails.by_node(rail, counts).offsets
        for number, members in enumerate(rails.members(rail)):
            for index, member in enumerate(members):
                if number != here:
                    rails.put(rails.at(slots[rail], offsets[number] + index * count, count, dtype), result(member))
