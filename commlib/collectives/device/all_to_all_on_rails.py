"""All-to-all of devices' arrays in groups on several nodes.

The devices of a node copy from each other what stays there, and what each rail sends to the other nodes; what comes
over the rails they copy from those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from commlib.collectives.call import Call
from commlib.collectives.device.rails import DeviceRails, Piece
from commlib.devices.array import DeviceArray
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Move, Open
from commlib.schedule.layout import uneven
from commlib.transport.base import WaitHook


def all_to_all(board: DeviceBoard, open_slots: Open, group: Group, call: Call) -> Move:
    """Return an all-to-all among all ranks; `board` is where those of this node meet."""
    rails = DeviceRails(board, open_slots, group, call, call.nbytes)
    largest = max(map(len, rails.nodes))

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        # What comes over a rail for all for whom it stands here; that is at least what a rank sends.
        parts = group.size * rails.most_members
        crossing = len(rails.nodes) * largest * rails.most_members
        longest = rails.longest(parts, crossing, call.dtype.itemsize)
        most = crossing * min(longest, call.count // group.size) * call.dtype.itemsize
        rails.run(call.count // group.size, longest, partial(_stages, rails, call, most, x, target))

    return move


def _stages(
    rails: DeviceRails, call: Call, most: int, x: DeviceArray, target: DeviceArray, piece: Piece
) -> Iterator[None]:
    """most: by how many bytes to choose the algorithm. Where nodes differ, ranks have different amounts to send."""
    count, dtype, here, size = piece.count, call.dtype, rails.number, len(rails.ranks)
    chunk, rank = call.count // rails.group.size, rails.group.rank
    by_rail = [rails.members(rail) for rail in range(rails.rails)]
    order = list(chain.from_iterable(chain(*members) for members in by_rail))
    begins = {member: index * count for index, member in enumerate(order)}  # where a slot has what is for whom

    def part(array: DeviceArray, rank: int) -> DeviceArray:
        return array[rank * chunk + piece.start : rank * chunk + piece.stop]

    slots = rails.board.turn_slots()
    for member in order:
        rails.put(part(x, member), rails.at(slots[rails.place], begins[member], count, dtype))
    rails.meet()
    for slot, other in zip(slots, rails.ranks, strict=True):
        rails.put(rails.at(slot, begins[rank], count, dtype), part(target, other))
    if rails.on_rail:
        # For each other node, from each rank here: what is for those ranks there for whom the rail stands.
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
    slots = rails.board.turn_slots()
    if rails.on_rail:
        ours = len(rails.on_same_rail(here, rails.place))
        incoming = uneven(0 if n == here else len(there) * ours * count for n, there in enumerate(rails.nodes))
        arrived = rails.block(piece, incoming.count, dtype, "arrived")
        rails.network("all_to_all", [leaving, arrived], [outgoing, incoming], nbytes=most)
        rails.put(arrived, rails.at(slots[rails.place], 0, incoming.count, dtype))
    rails.meet()
    giver = rails.place % rails.rails
    members = rails.on_same_rail(here, giver)
    offset = members.index(rank) * count
    for number, there in enumerate(rails.nodes):
        for sender in there if number != here else ():
            rails.put(rails.at(slots[giver], offset, count, dtype), part(target, sender))
            offset += len(members) * count
