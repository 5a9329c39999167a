"""Device rails: the steps of one hierarchical call on device arrays, which runs piece by piece.

Within the node the devices copy from each other's slots. Messages between nodes use host memory, or device memory if
the transport accepts it. While one piece crosses the network, the devices prepare the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.network_memory import network_memory_of
from commlib.collectives.host.rails import Rails
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address
from commlib.devices.protocol import DeviceEvent
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import OpenSlots
from commlib.schedule.layout import Layout, uneven

_LINE = 512  # bytes: piece sizes are multiples of this where possible, because memory is read in full lines


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call: elements `start` to `stop` of each chunk. number: counts from 0."""

    number: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def of(self, count: int) -> int:
        """Return how many elements the piece has of a chunk of `count` elements."""
        return max(min(count, self.stop) - self.start, 0)


Stages = Callable[[CallPiece], Iterator[None]]
"""Queue the work of a piece before the network step; yield once; run the network step and queue the remaining work."""


class DeviceRails(Rails):
    """The `Rails` of a call on device arrays. `direct`: the transport accepts device memory."""

    def __init__(self, board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call, nbytes: int) -> None:
        super().__init__(group, call.text, nbytes)
        self.board, self.device, self._open_slots = board, board.device, open_slots
        self.direct = group.transport.accepts(self.device.name)
        self._crossing = network_memory_of(board, direct=self.direct)
        self._synchronized: DeviceEvent | None = None

    def begin(self) -> None:
        """Synchronize the node's ranks on the host and check that all make the same call. Raises MismatchError.

        A rank that sends no message has no other check.
        """
        super().begin()
        if not self.board.is_same(self.group.status.history, self.group.waits.watch(self.text)):
            raise self.group.calls.different(self.text)
        self._open_slots()

    def members(self, rail: int) -> list[tuple[int, ...]]:
        """Return, for each node, the ranks whose data a rail carries."""
        return [self.on_same_rail(number, rail) for number in range(len(self.nodes))]

    @property
    def most_members(self) -> int:
        """The largest number of a node's ranks whose data one rail carries."""
        return max(map(len, self.members(0)))

    def by_node(self, rail: int, counts: Sequence[int]) -> Layout:
        """Return the layout of a rail's data with one chunk for each node; `counts[r]` elements for rank r."""
        return uneven(sum(counts[rank] for rank in ranks) for ranks in self.members(rail))

    # Pieces

    def longest(self, parts: int, crossing: float, item_bytes: int) -> int:
        """Return the number of elements of each chunk in a piece.

        parts: the chunks that a slot must hold. crossing: the chunks that cross the network on one rail, about
        COMMLIB_STAGING_KIB at a time. Both are the same on all ranks. Raises UsageError if not even one element fits.
        """
        room = self.board.part_bytes(1) // (parts * item_bytes)
        line = max(_LINE // item_bytes, 1)
        if room == 0:
            raise UsageError(
                f"{self.text}: the device slots of {self.board.part_bytes(1) >> 10} KiB are too small for "
                f"{self.group.size} ranks: set COMMLIB_DEVICE_SLOT_KIB to {parts * item_bytes // 1024 + 1} on all ranks"
            )
        wanted = int(self.group.config.staging_kib * 1024 / (crossing * item_bytes))
        count = min(room, max(wanted, line))
        return count - count % line if count >= line else count

    def run(self, count: int, longest: int, stages: Stages) -> None:
        """Run a call piece by piece; each piece has at most `longest` of the `count` elements of each chunk.

        While one piece crosses the network, the first part of the next piece is queued. Returns after the last
        synchronization of the node's streams, so the host notices if a rank never reaches it.
        """
        before: tuple[Iterator[None], DeviceEvent] | None = None
        for number, start in enumerate(range(0, count, longest)):
            piece = stages(CallPiece(number, start, min(start + longest, count)))
            next(piece)
            current = piece, self.device.current().record()
            if before is not None:
                self._end(*before)
            before = current
        if before is not None:
            self._end(*before)
        if self._synchronized is not None:
            wait_for(self._synchronized, self.group.waits.watch(self.text))

    def _end(self, piece: Iterator[None], start_event: DeviceEvent) -> None:
        """Finish a piece after its queued work is done. Then the work of the piece two before is done, too."""
        wait_for(start_event, self.group.waits.watch(self.text))
        for _ in piece:
            pass

    # What pieces do

    def block(self, piece: CallPiece, count: int, dtype: Any, part: str = "") -> Any:
        """Return a buffer for elements of a piece on the network."""
        return self._crossing.block(piece.number, count, dtype, part)

    def at(self, slot: int, offset: int, count: int, dtype: Any) -> DeviceArray:
        """Return `count` elements of a slot, starting at element `offset`."""
        return self.board.at(slot + offset * dtype.itemsize, count, dtype)

    def synchronize(self) -> None:
        """Queue a synchronization: later work runs after all earlier work of the node's devices."""
        self.board.barrier()
        self._synchronized = self.device.current().record(self._synchronized)

    def put(self, source: Any, target: Any) -> None:
        """Queue a copy. If the dtypes differ, convert; then both arrays must be on the device."""
        if not target.size:
            return
        if source.dtype != target.dtype:
            self.device.kernels.cast(source, target)
        elif address(source) != address(target):
            self.device.copy(target, source)
