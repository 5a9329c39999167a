"""All-reduce of devices' arrays in groups on several nodes.

Reduce-scatter between the devices of a node, an exchange of each share between the nodes, all-gather between devices.

While a share of one piece is on the network, the devices combine the next piece.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.rails import Rails
from commlib.devices.array import DeviceArray
from commlib.devices.waiting import wait_for
from commlib.dtypes import NUMPY, accumulator_dtype, kernel_operation, name_of
from commlib.execution.accumulation import wide_bytes
from commlib.execution.reduce_op import ReduceOp
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Move, Open
from commlib.schedule.layout import Layout, even
from commlib.transport.base import WaitHook


@dataclass(slots=True)
class _Piece:
    """A piece of the array on its way. shares: of the rails. own: this rank's, on its device. block: that on the host.

    there: when the block has what this node has combined.
    """

    start: int
    slots: list[int]
    shares: Layout
    own: DeviceArray | None = None
    block: Any = None
    there: Any = None


def all_reduce(board: DeviceBoard, open_slots: Open, group: Group, call: Call) -> Move:
    """Return an all-reduce among all ranks; `board` is where those of this node meet."""
    name = name_of(call.dtype)
    operation = kernel_operation(name, call.op)
    wide = accumulator_dtype(name, operation)  # what travels between the nodes, and is rounded once at the end
    combine = ReduceOp(wide, "sum" if operation == "mean" else operation)
    finish = ReduceOp(wide, operation, group.size) if operation == "mean" else None
    device, item = board.device, combine.item_bytes
    rails = Rails(group, call.text, wide_bytes(call.count, call.dtype, call.op))
    direct = group.transport.accepts(device.name)

    def put(source: DeviceArray, target: DeviceArray) -> None:
        if source.dtype == target.dtype:
            device.copy(target, source)
        else:
            device.kernels.cast(source, target)

    def begin(x: DeviceArray, start: int, stop: int, number: int) -> _Piece:
        slots = board.turn_slots()
        piece = _Piece(start, slots, even(stop - start, rails.rails))
        put(x[start:stop], board.at(slots[board.rank], stop - start, NUMPY[wide]))
        board.meet()
        if not rails.on_rail:
            return piece
        first, last = piece.shares.slice_of(rails.place)
        shares = [board.at(slot + first * item, last - first, NUMPY[wide]) for slot in slots]
        piece.own = shares[board.rank]
        if last > first:
            combine.combine(shares, piece.own)
        if not direct:
            piece.block = blocks[number % 2][: last - first]
            device.copy(piece.block, piece.own)
            piece.there = device.current().record()
        return piece

    def exchange(piece: _Piece, on_wait: WaitHook) -> None:
        if piece.own is None:
            return
        if piece.there is not None:
            wait_for(piece.there, on_wait)
        share: Any = piece.own if direct else piece.block
        rails.network("all_reduce", [share], [], op=combine, nbytes=nbytes[0])

    def end(piece: _Piece, target: DeviceArray) -> None:
        if piece.own is not None:
            if not direct:
                device.copy(piece.own, piece.block)
            if finish is not None and piece.own.size:
                finish.combine([piece.own], piece.own)
        board.meet()
        for place in range(rails.rails):
            first, last = piece.shares.slice_of(place)
            if last > first:
                share = board.at(piece.slots[place] + first * item, last - first, NUMPY[wide])
                put(share, target[piece.start + first : piece.start + last])
        board.meet()  # only then may this slot have something else

    blocks: list[Any] = []
    nbytes: list[int] = []

    def move(x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        open_slots()
        rails.begin()
        longest = board.part_bytes(1) // item
        if not blocks:
            share = -(-min(longest, call.count) // rails.rails) * item
            blocks.extend(device.staging(share).view(NUMPY[wide]) for _ in range(2))
            nbytes.append(share)
        under_way: deque[_Piece] = deque()
        for number, start in enumerate(range(0, call.count, longest)):
            under_way.append(begin(x, start, min(start + longest, call.count), number))
            if len(under_way) == 2:
                exchange(under_way[0], on_wait)
                end(under_way.popleft(), target)
        while under_way:
            exchange(under_way[0], on_wait)
            end(under_way.popleft(), target)

    return move
