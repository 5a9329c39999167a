"""Reduce-scatter of device arrays in groups on several nodes.

The devices of a node combine the chunks of each rail. The rails reduce-scatter the sums over the network. Each rank
then copies its chunk from the slot of its rail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from commlib.collectives.call import Call
from commlib.collectives.device.accumulation import WideAccumulation
from commlib.collectives.device.rails import CallPiece, DeviceRails
from commlib.collectives.operands import row_layout
from commlib.devices.array import DeviceArray
from commlib.execution.accumulation import wide_bytes
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue, OpenSlots
from commlib.schedule.layout import Layout, uneven
from commlib.transport.base import WaitHook


def reduce_scatter(board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call) -> Enqueue:
    """Return a reduce-scatter among all ranks; `board` connects the devices of this node."""
    assert isinstance(call.size, tuple)
    chunks = row_layout(call.size, group.size)
    rails = DeviceRails(board, open_slots, group, call, wide_bytes(call.count, call.dtype, call.op))
    wide = WideAccumulation.of(call.dtype, call.op, group.size)
    on_a_rail = sum(map(len, rails.members(0)))

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        rails.begin()
        longest = rails.longest(group.size, on_a_rail, wide.dtype.itemsize)
        rails.run(max(chunks.counts), longest, partial(_stages, rails, wide, chunks, x, target))

    return move


def _stages(
    rails: DeviceRails, wide: WideAccumulation, chunks: Layout, x: DeviceArray, target: DeviceArray, piece: CallPiece
) -> Iterator[None]:
    counts, rank = [piece.of(count) for count in chunks.counts], rails.group.rank
    by_rail = [list(chain(*rails.members(rail))) for rail in range(rails.rails)]
    slots = rails.board.switch_slots()
    _fill_slot(rails, wide, list(chain(*by_rail)), counts, x, chunks, slots[rails.place], piece)
    rails.synchronize()
    if rails.on_rail:
        begins = uneven(sum(counts[member] for member in members) for members in by_rail)
        start, stop = begins.slice_of(rails.place)
        parts = [rails.at(slot, start, stop - start, wide.dtype) for slot in slots]
        block = rails.block(piece, stop - start, wide.dtype)
        combined = block if rails.direct else parts[rails.place]  # no other rank reads this part of this rank's slot
        wide.combine(parts, combined)
        rails.put(combined, block)
    yield
    slots = rails.board.switch_slots()
    if rails.on_rail:
        layout = rails.by_node(rails.place, counts)
        rails.network("reduce_scatter", [block], [layout], op=wide.operation)
        start, stop = layout.slice_of(rails.number)
        reduced = rails.at(slots[rails.place], 0, stop - start, wide.dtype)
        rails.put(block[start:stop], reduced)
        wide.finish(reduced)
    rails.synchronize()
    giver = rails.place % rails.rails
    members = rails.on_same_rail(rails.number, giver)
    offset = sum(counts[member] for member in members[: members.index(rank)])
    rails.put(
        rails.at(slots[giver], offset, counts[rank], wide.dtype), target[piece.start : piece.start + counts[rank]]
    )


def _fill_slot(
    rails: DeviceRails,
    wide: WideAccumulation,
    order: Sequence[int],
    counts: Sequence[int],
    x: DeviceArray,
    chunks: Layout,
    slot: int,
    piece: CallPiece,
) -> None:
    """Copy the chunks of a piece into a slot, one for each rank, in this order."""
    offset = 0
    for member in order:
        count, begin = counts[member], chunks.offsets[member] + piece.start
        rails.put(x[begin : begin + count], rails.at(slot, offset, count, wide.dtype))
        offset += count
