"""Hierarchical collectives of device arrays, in groups on several nodes.

Within a node the devices copy from each other's slots. Messages between nodes use host memory, or device memory if the
transport accepts it. `schedule.hierarchy` has the steps; while one piece crosses the network, the devices prepare the
next.
"""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.accumulation import WideAccumulation
from commlib.collectives.device.network_memory import network_memory_of
from commlib.collectives.device.slot_exchange import SlotExchange, plan_exchange
from commlib.collectives.executor import CallPiece, run
from commlib.collectives.rails import RailProgram, Rails
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address
from commlib.devices.protocol import DeviceEvent
from commlib.devices.waiting import wait_for
from commlib.errors import UsageError
from commlib.execution.streaming import Hook
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import OpenSlots
from commlib.schedule.hierarchy import NodeStep
from commlib.schedule.rail_map import Buffer
from commlib.transport.base import WaitHook

_LINE = 512  # bytes: piece sizes are multiples of this where possible, because memory is read in full lines


class DeviceSteps:
    """A hierarchical call on device arrays; `board` connects the devices of this node.

    Its exchanges are planned in the first run. direct: the transport accepts device memory.
    """

    def __init__(
        self, board: DeviceBoard, open_slots: OpenSlots, group: Group, call: Call, counts: tuple[int, ...]
    ) -> None:
        self.board, self.group, self.text = board, group, call.text
        self._open_slots, self._counts = open_slots, counts
        self.wide = WideAccumulation.of(call.dtype, call.op, group.size) if call.op else None
        self.dtype = call.dtype if self.wide is None else self.wide.dtype
        self.rails = Rails(group, call, counts, self.dtype.itemsize)
        self.direct = group.transport.accepts(board.device.name)
        self.network = network_memory_of(board, direct=self.direct)
        self._pieces: tuple[CallPiece, ...] = ()
        self._exchanges: dict[tuple[int, int], SlotExchange] = {}
        self._programs: dict[int, RailProgram] = {}

    def run(self, x: DeviceArray, target: DeviceArray, on_wait: WaitHook) -> None:
        """Run the call, within an operation, on contiguous 1-D arrays. Raises MismatchError for different calls.

        The node's ranks synchronize on the host first: a rank that sends no message has no other check.
        """
        if not self.board.is_same(self.group.status.history, self.group.waits.watch(self.text)):
            raise self.group.calls.different(self.text)
        self._open_slots()
        count = max(self._counts)
        if not self._pieces and count:
            longest = self._longest()
            self._pieces = self.rails.pieces([*range(0, count, longest), count])
        run(self.rails.steps, self._pieces, DeviceCallMemory(self, self._pieces, x, target))

    def _longest(self) -> int:
        """Return the number of elements of each chunk in a piece, the same on all ranks.

        A slot must hold what a rank passes on, and about COMMLIB_STAGING_KIB cross the network at a time on each rail.
        Raises UsageError if not even one element fits.
        """
        steps, item_bytes, room = self.rails.steps, int(self.dtype.itemsize), self.board.part_bytes(1)
        parts = 1 if steps.is_whole else steps.slot_chunks
        crossing = 1 / self.rails.number if steps.is_whole else steps.rail_chunks
        if room < parts * item_bytes:
            raise UsageError(
                f"{self.text}: the device slots of {room >> 10} KiB are too small for "
                f"{self.group.size} ranks: set COMMLIB_DEVICE_SLOT_KIB to {parts * item_bytes // 1024 + 1} on all ranks"
            )
        line = max(_LINE // item_bytes, 1)
        wanted = int(self.group.config.staging_kib * 1024 / (crossing * item_bytes))
        count = min(room // (parts * item_bytes), max(wanted, line))
        return count - count % line if count >= line else count

    def exchange(self, step: NodeStep, piece: CallPiece) -> SlotExchange:
        """Return the plan of a step on pieces of this kind."""
        key = id(step), piece.kind
        plan = self._exchanges.get(key)
        if plan is None:
            hierarchy, runs = self.group.hierarchy, self.rails.runs(step, piece)
            plan = self._exchanges[key] = plan_exchange(step, runs, hierarchy.ranks, hierarchy.place)
        return plan

    def program(self, piece: CallPiece) -> RailProgram:
        """Return the program of the rail for pieces of this kind; one algorithm for all pieces."""
        program = self._programs.get(piece.kind)
        if program is None:
            program = self._programs[piece.kind] = self.rails.compile(self._pieces[0].counts, [piece], [0])
        return program


class DeviceCallMemory:
    """The `executor.CallMemory` of one run on device arrays."""

    def __init__(self, steps: DeviceSteps, pieces: tuple[CallPiece, ...], x: DeviceArray, target: DeviceArray) -> None:
        self._steps, self._pieces, self._board, self._device = steps, pieces, steps.board, steps.board.device
        self._arrays: dict[Buffer, DeviceArray] = {"source": x, "target": target}
        self._buffers: dict[int, dict[Buffer, Any]] = {}  # of the rail, by the number of the piece
        self._synchronized: DeviceEvent | None = None

    def exchange(self, step: NodeStep, piece: CallPiece) -> None:
        """Queue a step of the node."""
        plan, wide = self._steps.exchange(step, piece), self._steps.wide
        for source, start, target, place, count in plan.copies:
            self._put(self._part(piece, source, start, count), self._part(piece, target, place, count))
        if plan.is_local:
            return
        slots = self._board.switch_slots()
        own = self._steps.group.hierarchy.place
        for source, start, offset, count in plan.published:
            published = self._slot(slots[own], offset, count)
            self._put(self._part(piece, source, start, count), published)
            if source == "incoming" and wide is not None:
                wide.finish(published)
        self._synchronize()
        for giver, offset, target, place, count in plan.taken:
            self._put(self._slot(slots[giver], offset, count), self._part(piece, target, place, count))
        for offset, target, place, count in plan.combined:
            parts, into = [self._slot(slot, offset, count) for slot in slots], self._part(piece, target, place, count)
            assert wide is not None
            combined = into if self._steps.direct else parts[own]  # no other rank reads this part of this rank's slot
            wide.combine(parts, combined)
            self._put(combined, into)

    def finish(self, piece: CallPiece) -> None:
        """Do nothing: a rank divides what it publishes."""

    def stream(self, prepare: Hook, complete: Hook) -> None:
        """Run the rail's verb on all pieces: while one crosses the network, the work before the next one is queued.

        Returns after the last synchronization of the node's streams, so the host notices if a rank never reaches it.
        """
        before: tuple[CallPiece, DeviceEvent] | None = None
        for piece in self._pieces:
            self._buffers[piece.number] = self._allocate(piece)
            prepare(piece.number)
            current = piece, self._device.current().record()
            if before is not None:
                self._cross(*before, complete)
            before = current
        if before is not None:
            self._cross(*before, complete)
        if self._synchronized is not None:
            wait_for(self._synchronized, self._steps.group.waits.watch(self._steps.text))

    def _cross(self, piece: CallPiece, prepared: DeviceEvent, complete: Hook) -> None:
        """Finish a piece after its queued work is done. Then the work of the piece two before is done, too."""
        steps, rail = self._steps, self._steps.rails.steps.rail
        wait_for(prepared, steps.group.waits.watch(steps.text))
        if rail is not None:
            regions = [self._buffers[piece.number][buffer] for buffer in rail.buffers]
            operation = None if steps.wide is None else steps.wide.operation
            steps.rails.execute(steps.program(piece), regions, operation, part=piece.number + 1)
        complete(piece.number)
        del self._buffers[piece.number]

    def _allocate(self, piece: CallPiece) -> dict[Buffer, Any]:
        """Return the rail's buffers: for each region memory of the network, and this node's part of it."""
        steps, rail = self._steps, self._steps.rails.steps.rail
        if rail is None:
            return {}
        layouts = steps.rails.layouts(piece.counts)
        buffers: dict[Buffer, Any] = {
            buffer: steps.network.block(piece.number, layout.count, steps.dtype, buffer)
            for buffer, layout in zip(rail.buffers, layouts, strict=True)
        }
        if len(buffers) == 1:
            ((buffer, block),) = buffers.items()
            own = slice(None) if steps.rails.steps.is_whole else slice(*layouts[0].slice_of(steps.rails.node))
            buffers["incoming" if buffer == "outgoing" else "outgoing"] = block[own]
        return buffers

    def _part(self, piece: CallPiece, buffer: Buffer, start: int, count: int) -> Any:
        array = self._arrays.get(buffer)
        if array is None:
            return self._buffers[piece.number][buffer][start : start + count]
        return array[piece.start + start : piece.start + start + count]

    def _slot(self, slot: int, offset: int, count: int) -> DeviceArray:
        dtype = self._steps.dtype
        return self._board.at(slot + offset * dtype.itemsize, count, dtype)

    def _synchronize(self) -> None:
        """Queue a synchronization: later work runs after all earlier work of the node's devices."""
        self._board.barrier()
        self._synchronized = self._device.current().record(self._synchronized)

    def _put(self, source: Any, target: Any) -> None:
        """Queue a copy. If the dtypes differ, convert; then both arrays must be on the device."""
        if not target.size:
            return
        if source.dtype != target.dtype:
            self._device.kernels.cast(source, target)
        elif address(source) != address(target):
            self._device.copy(target, source)
