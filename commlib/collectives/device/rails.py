"""This rank's node and its rails in one kind of hierarchical call on arrays of devices, which goes piece by piece.

Within the node devices copy from each other's slots; what crosses the network does so from memory of the host, or of
the device where messages take that. While one piece is on the network, the devices prepare the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.network_memory import crossing_of
from commlib.collectives.host.rails import Rails
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address
from commlib.devices.protocol import Event
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Open
from commlib.schedule.layout import Layout, uneven

_LINE = 512  # bytes: pieces are multiples of so many where they can be, as memory is read in whole lines


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a call: the elements from `start` to `stop` of each chunk that it has. number: from 0."""

    number: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def of(self, count: int) -> int:
        """Return how many elements the piece has of a chunk with `count`."""
        return max(min(count, self.stop) - self.start, 0)


Stages = Callable[[Piece], Iterator[None]]
"""Queue what a piece does before it crosses the network; yield once; let it cross, and queue the rest."""


class DeviceRails(Rails):
    """See above. `direct`: messages take the device's memory."""

    def __init__(self, board: DeviceBoard, open_slots: Open, group: Group, call: Call, nbytes: int) -> None:
        super().__init__(group, call.text, nbytes)
        self.board, self.device, self._open_slots = board, board.device, open_slots
        self.direct = group.transport.accepts(self.device.name)
        self._crossing = crossing_of(board, direct=self.direct)
        self._met: Event | None = None

    def begin(self) -> None:
        """Let the hosts of the node meet, and see that all make this call. Raises MismatchError.

        Nothing else says so where a rank sends no message.
        """
        super().begin()
        if not self.board.is_same(self.group.history, self.group.watch(self.text)):
            raise self.group.different(self.text)
        self._open_slots()

    def members(self, rail: int) -> list[tuple[int, ...]]:
        """Return the ranks for which a rail stands, for each node."""
        return [self.on_same_rail(number, rail) for number in range(len(self.nodes))]

    @property
    def most_members(self) -> int:
        """For how many ranks of a node a rail stands at most."""
        return max(map(len, self.members(0)))

    def by_node(self, rail: int, counts: Sequence[int]) -> Layout:
        """Return what a rail has in one chunk for each node; `counts[r]` elements for rank r."""
        return uneven(sum(counts[rank] for rank in ranks) for ranks in self.members(rail))

    # Pieces

    def longest(self, parts: int, crossing: float, item_bytes: int) -> int:
        """Return how many elements of each chunk a piece has.

        parts: how many chunks a slot must hold. crossing: how many cross the network on one rail, some
        COMMLIB_STAGING_KIB at a time. Both the same on all ranks. Raises UsageError if not even one element fits.
        """
        room = self.board.part_bytes(1) // (parts * item_bytes)
        line = max(_LINE // item_bytes, 1)
        if room == 0:
            raise UsageError(
                f"{self.text}: {self.group.size} ranks need larger slots between the devices of a node than "
                f"{self.board.part_bytes(1) >> 10} KiB: set COMMLIB_DEVICE_SLOT_KIB to {parts * item_bytes // 1024 + 1}"
            )
        wanted = int(self.group.config.staging_kib * 1024 / (crossing * item_bytes))
        count = min(room, max(wanted, line))
        return count - count % line if count >= line else count

    def run(self, count: int, longest: int, stages: Stages) -> None:
        """Run a call piece by piece, each of at most `longest` of the `count` elements of each chunk.

        While one piece is on the network, what the next one does before that is queued. Returns when the streams of the
        node have met for the last time: if a rank does not come so far, no stream waits for it where nobody looks.
        """
        before: tuple[Iterator[None], Event] | None = None
        for number, start in enumerate(range(0, count, longest)):
            piece = stages(Piece(number, start, min(start + longest, count)))
            next(piece)
            begun = piece, self.device.current().record()
            if before is not None:
                self._end(*before)
            before = begun
        if before is not None:
            self._end(*before)
        if self._met is not None:
            wait_for(self._met, self.group.watch(self.text))

    def _end(self, piece: Iterator[None], begun: Event) -> None:
        """Go on with a piece when what it has queued is done: and so is what two pieces before have queued."""
        wait_for(begun, self.group.watch(self.text))
        for _ in piece:
            pass

    # What pieces do

    def block(self, piece: Piece, count: int, dtype: Any, part: str = "") -> Any:
        """Return memory in which elements of a piece cross the network."""
        return self._crossing.block(piece.number, count, dtype, part)

    def at(self, slot: int, offset: int, count: int, dtype: Any) -> DeviceArray:
        """Return elements of a slot, from element `offset` on."""
        return self.board.at(slot + offset * dtype.itemsize, count, dtype)

    def meet(self) -> None:
        """Queue: what follows is behind what all devices of the node did before."""
        self.board.meet()
        self._met = self.device.current().record(self._met)

    def put(self, source: Any, target: Any) -> None:
        """Queue a copy, with a conversion where dtypes differ: then both are on the device."""
        if not target.size:
            return
        if source.dtype != target.dtype:
            self.device.kernels.cast(source, target)
        elif address(source) != address(target):
            self.device.copy(target, source)
