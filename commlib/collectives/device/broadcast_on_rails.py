"""Broadcast of device arrays in groups on several nodes.

The devices of the root's node copy from the root's slot. Each rail sends its share to the other nodes. The devices of
those nodes gather the shares.
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
from commlib.schedule.layout import even
from commlib.transport.base import WaitHook


def broadcast(board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call) -> Enqueue:
    """Return a broadcast among all ranks; `board` connects the devices of this node."""
    rails = DeviceRails(board, open_slots, group, call, call.nbytes)

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        longest = rails.longest(1, 1 / rails.rails, call.dtype.itemsize)
        rails.run(call.count, longest, partial(_stages, rails, call, x))

    return move


def _stages(rails: DeviceRails, call: Call, x: DeviceArray, piece: CallPiece) -> Iterator[None]:
    home, whole = rails.group.topology.node(call.root), x[piece.start : piece.stop]
    shares = even(piece.count, rails.rails)
    start, stop = shares.slice_of(rails.place) if rails.on_rail else (0, 0)
    block = rails.block(piece, stop - start, call.dtype)
    if rails.number == home:
        slots = rails.board.switch_slots()
        slot = rails.at(slots[rails.ranks.index(call.root)], 0, piece.count, call.dtype)
        is_root = rails.group.rank == call.root
        if is_root:
            rails.put(whole, slot)
        rails.synchronize()
        if not is_root:
            rails.put(slot, whole)
        rails.put(whole[start:stop], block)
    yield
    if rails.on_rail:
        rails.network("broadcast", [block], [even(len(block), 1)], root=home)
    if rails.number != home:
        slots = rails.board.switch_slots()
        rails.put(block, rails.at(slots[rails.place], start, stop - start, call.dtype))
        rails.synchronize()
        for place in range(rails.rails):
            start, stop = shares.slice_of(place)
            rails.put(rails.at(slots[place], start, stop - start, call.dtype), whole[start:stop])
