"""DeviceBoard: barriers between the streams of a node's ranks, and slots of device memory to exchange data.

The host of a rank only queues work on its stream; the streams wait for each other on the devices (`Signals`).
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, DeviceEvent, Signals, UnreachableMemoryError
from commlib.devices.waiting import wait_for
from commlib.errors import StallError, TransportError
from commlib.node.board import NodeBoard
from commlib.protocols import SharedMemory
from commlib.transport.base import Gather, Transport, WaitHook

log = logging.getLogger("commlib")

Value = TypeVar("Value")

# Bytes: the flags of different ranks are in separate cache lines.
_LINE = 64
_PAGE = 4096

_AHEAD = 1 << 30  # added to a number, it releases every wait of a stream
_NUMBERS = 1 << 32

# Seconds for the first barrier: all ranks have arrived, so a stream that misses this deadline never arrives.
FIRST_BARRIER_TIMEOUT = 10.0

_ALIGNED = 512  # bytes between parts of a slot


class DeviceBoard:
    """The device board of a group with all its ranks on one node. board: the host's board.

    memory: the group's symmetric memory on the device.
    """

    def __init__(
        self,
        device: Device,
        board: NodeBoard,
        memory: SymmetricMemory,
        share: Callable[[int, Gather], SharedMemory],
        words: SharedMemory,
        signals: Signals,
    ) -> None:
        self.device, self.rank, self.size = device, board.rank, board.size
        self._board, self._memory, self._words, self._signals = board, memory, words, signals
        self._share = share
        self.by_host = False
        """Whether the slots are in host memory, because the devices cannot address each other's memory."""
        self.cached: dict[Any, Any] = {}
        """Objects that collectives cache with the board, by key."""
        self._side_stream = device.stream()
        self._number = 0
        self._slots: SharedMemory | None = None
        self._slot_bytes, self._turn = 0, 0
        self._scratch: list[DeviceArray] = []

    @classmethod
    def make(
        cls,
        device: Device,
        board: NodeBoard,
        memory: SymmetricMemory,
        transport: Transport,
        gather: Gather,
        on_wait: WaitHook,
        *,
        ipc: bool = True,
    ) -> DeviceBoard:
        """Create the device board of all ranks. Collective. Raises TransportError on all ranks if one of them fails.

        ipc: let the devices address each other's memory, if they can.
        """
        size = board.size
        words = transport.share(-(-size * _LINE // _PAGE) * _PAGE, gather)
        outgoing = [words.bases[peer] + board.rank * _LINE for peer in range(size) if peer != board.rank]
        incoming = [words.bases[board.rank] + peer * _LINE for peer in range(size) if peer != board.rank]
        result: DeviceBoard | None = None
        refusal = ""
        try:
            result = cls(device, board, memory, transport.share, words, device.signals(words, outgoing, incoming))
        except TransportError as error:
            refusal = f"rank {board.members[board.rank]}: {error}"
        _agree(gather, refusal)
        assert result is not None
        deadline = time.monotonic() + FIRST_BARRIER_TIMEOUT

        def look() -> None:
            on_wait()
            if time.monotonic() > deadline:
                raise StallError("")

        result.barrier()
        try:
            wait_for(device.current().record(), look)
        except StallError:
            refusal = f"rank {result.rank}: its stream did not reach the others' within {FIRST_BARRIER_TIMEOUT} s"
            result.release()
        _agree(gather, refusal)
        result.by_host = not (all(gather(ipc)) and result._can_address_peers(gather))
        return result

    def _can_address_peers(self, gather: Gather) -> bool:
        """Return whether all devices can address each other's memory. Collective."""
        try:
            self.device.share(_PAGE, self.rank, gather).close()
        except UnreachableMemoryError as error:
            level = logging.WARNING if self.rank == 0 else logging.DEBUG
            log.log(level, "devices exchange data through host memory: %s", str(error))
            return False
        return True

    def barrier(self) -> None:
        """Queue a barrier of all ranks' current streams: later work on each follows earlier work on all of them."""
        self._number = (self._number + 1) % _NUMBERS  # it wraps like 32 bits
        self._signals.queue(self._number)

    def run_on_side_stream(self, run: Callable[[], Value]) -> tuple[Value, DeviceEvent]:
        """Call `run` with a side stream as current stream, ordered after the work queued so far on this one.

        Returns its value, and an event after its work.
        """
        self._side_stream.wait(self.device.current().record())
        with self.device.using(self._side_stream):
            return run(), self._side_stream.record()

    def is_same(self, number: int, on_wait: WaitHook) -> bool:
        """Return whether all ranks have given the same number, by a barrier of the hosts. Collective."""
        return self._board.barrier(number, on_wait)

    def find(self, array: DeviceArray) -> tuple[int, list[int]]:
        """Return (symmetric place, addresses of all ranks' arrays) of an array in symmetric memory, else (0, [])."""
        return self._memory.find(array.address, array.nbytes) or (0, [])

    def open_slots(self, nbytes: int, gather: Callable[[Any], list[Any]]) -> None:
        """Create two slots of `nbytes` for each rank, unless they exist. Collective."""
        if self._slots is None:
            self._slots, self._slot_bytes = self._make_slots(2 * nbytes, gather), nbytes

    def _make_slots(self, nbytes: int, gather: Gather) -> SharedMemory:
        if not self.by_host:
            return self.device.share(nbytes, self.rank, gather)
        memory, refusal = self._share(nbytes, gather), ""
        try:
            memory = self.device.reach(memory)
        except TransportError as error:
            refusal = f"rank {self._board.members[self.rank]}: {error}"
        try:
            _agree(gather, refusal)
        except TransportError:
            memory.close()
            raise
        return memory

    def part_bytes(self, parts: int) -> int:
        """Return the bytes of each part of a slot that is cut into `parts`."""
        return self._slot_bytes // parts // _ALIGNED * _ALIGNED

    def switch_slots(self) -> list[int]:
        """Switch to the other slots, and return their addresses by rank.

        If each turn has a barrier, other ranks have read this rank's slot by the time it is used again two turns later.
        """
        assert self._slots is not None
        self._turn = 1 - self._turn
        return [base + self._turn * self._slot_bytes for base in self._slots.bases]

    def near(self, nbytes: int) -> int:
        """Return the address of scratch memory on this rank's device, valid until the next call of `near`."""
        if not self._scratch or self._scratch[-1].nbytes < nbytes:
            # Keep the earlier memory: another stream may still use it.
            memory = self.device.empty((max(nbytes, self._slot_bytes),), np.uint8)
            self._scratch.append(self.device.wrap(memory, "memory of a board"))
        return self._scratch[-1].address

    def at(self, address: int, count: int, dtype: Any) -> DeviceArray:
        """Return memory at an address, of any rank's device, as an array."""
        return DeviceArray(self.device, address, (count,), dtype, self)

    def release(self) -> None:
        """Release this rank's stream from a wait for a rank that will never arrive. Its results are then invalid."""
        number = (self._number + _AHEAD) % _NUMBERS
        for peer in range(self.size):
            ctypes.c_uint32.from_address(self._words.bases[self.rank] + peer * _LINE).value = number

    def leave(self, reason: str) -> None:
        """End on this rank: see `group.standing.Attached`. Without a reason, work in flight may still succeed."""
        if reason:
            self.release()

    def close(self) -> None:
        """Release all resources. No queued work may still use them."""
        self._signals.close()
        self._words.close()
        if self._slots is not None:
            self._slots.close()

    def halt(self) -> None:
        """Do nothing in a forked child: see `group.standing.Attached`."""


def _agree(gather: Gather, refusal: str) -> None:
    if refusals := [text for text in gather(refusal) if text]:
        raise TransportError("; ".join(refusals))
