"""All-to-all of device arrays in groups on several nodes.

The devices of a node copy local chunks directly from each other's slots. Each rail's device collects the chunks for the
other nodes and sends them; the devices copy the chunks that arrive from the rail's slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from commlib.collectives.call import Call
from commlib.collectives.device.rails import CallPiece, DeviceRails
from commlib.devices.array import DeviceArray
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue, OpenSlots
from commlib.schedule.layout import uneven
from commlib.transport.base import WaitHook


def all_to_all(board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call) -> Enqueue:
    """Return an all-to-all among all ranks; `board` connects the devices of this node."""
    rails = DeviceRails(board, open_slots, group, call, call.nbytes)
    largest = max(map(len, rails.nodes))

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        # A slot must hold the chunks that arrive over a rail for all its ranks: at least as many as a rank sends.
        parts = group.size * rails.most_members
        crossing = len(rails.nodes) * largest * rails.most_members
        longest = rails.longest(parts, crossing, call.dtype.itemsize)
        most = crossing * min(longest, call.count // group.size) * call.dtype.itemsize
        rails.run(call.count // group.size, longest, partial(_stages, rails, call, most, x, target))

    return move


def _stages(
    rails: DeviceRails, call: Call, most: int, x: DeviceArray, target: DeviceArray, piece: CallPiece
) -> Iterator[None]:
    """most: the bytes by which to choose the algorithm. If nodes differ in size, ranks send different amounts."""
    count, dtype, here, size = piece.count, call.dtype, rails.number, len(rails.ranks)
    chunk, rank = call.count // rails.group.size, rails.group.rank
    by_rail = [rails.members(rail) for rail in range(rails.rails)]
    order = list(chain.from_iterable(chain(*members) for members in by_rail))
    begins = {member: index * count for index, member in enumerate(order)}  # offsets in a slot

    def part(array: DeviceArray, rank: int) -> DeviceArray:
        return array[rank * chunk + piece.start : rank * chunk + piece.stop]

    slots = rails.board.switch_slots()
    for member in order:
        rails.put(part(x, member), rails.at(slots[rails.place], begins[member], count, dtype))
    rails.synchronize()
    for slot, other in zip(slots, rails.ranks, strict=True):
        rails.put(rails.at(slot, begins[rank], count, dtype), part(target, other))
    if rails.on_rail:
        # For each other node, from each rank of this node: the chunks for the ranks of that node on this rail.
        receivers = by_rail[rails.place]
        outgoing = uneven(0 if n == here else size * len(there) * count for n, there in enumerate(receivers))
        leaving = rails.block(piece, outgoing.count, dtype, "leaving")
        for number, there in enumerate(receivers):
            length = 0 if number == here else len(there) * count
            for place, slot in enumerate(slots):
                begin = outgoing.offsets[number] + place * length
                if length:
                    rails.put(rails.at(slot, begins[there[0]], length, dtype), leaving[begin : begin + length])
    yield
    slots = rails.board.switch_slots()
    if rails.on_rail:
        ours = len(rails.on_same_rail(here, rails.place))
        incoming = uneven(0 if n == here else len(there) * ours * count for n, there in enumerate(rails.nodes))
        arrived = rails.block(piece, incoming.count, dtype, "arrived")
        rails.network("all_to_all", [leaving, arrived], [outgoing, incoming], nbytes=most)
        rails.put(arrived, rails.at(slots[rails.place], 0, incoming.count, dtype))
    rails.synchronize()
    giver = rails.place % rails.rails
    members = rails.on_same_rail(here, giver)
    offset = members.index(rank) * count
    for number, there in enumerate(rails.nodes):
        for sender in there if number != here else ():
            rails.put(rails.at(slots[giver], offset, count, dtype), part(target, sender))
            offset += len(members) * count
