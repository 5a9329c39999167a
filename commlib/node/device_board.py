"""DeviceBoard: let the streams of a node's ranks meet, and give them memory of their devices to exchange data through.

The host of a rank only queues what its stream does: the streams wait for each other by themselves (`Signals`).
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from commlib.buffers.symmetric import SymmetricMemory
from commlib.devices.array import DeviceArray
from commlib.devices.protocol import Device, Event, OutOfReachError, Signals
from commlib.devices.waiting import wait_for
from commlib.errors import StallError, TransportError
from commlib.node.board import NodeBoard
from commlib.protocols import SharedMemory
from commlib.transport.base import Gather, Transport, WaitHook

log = logging.getLogger("commlib")

Value = TypeVar("Value")

# Words of different ranks are in cache lines of their own.
_LINE = 64
_PAGE = 4096

_AHEAD = 1 << 30  # what a stream waits for is behind that, whatever it waits for
_NUMBERS = 1 << 32

# Seconds for the first meeting: all ranks are there, so a device that has not met by then will not.
FIRST_MEETING = 10.0

_ALIGNED = 512  # bytes between parts of a slot


class DeviceBoard:
    """See above. Where the ranks of one group are, all on one node: `board` is their host's.

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
        """Whether the slots are memory of the host, as the devices cannot address each other's."""
        self.kept: dict[Any, Any] = {}
        """What collectives keep with it."""
        self._aside = device.stream()
        self._number = 0
        self._slots: SharedMemory | None = None
        self._slot_bytes, self._turn = 0, 0
        self._near: list[DeviceArray] = []

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
        """Return that of all ranks. Collective. Raises TransportError on all ranks if one of them cannot.

        ipc: the devices may address each other's memory, if they can.
        """
        size = board.size
        words = transport.share(-(-size * _LINE // _PAGE) * _PAGE, gather)
        tell = [words.bases[peer] + board.rank * _LINE for peer in range(size) if peer != board.rank]
        hear = [words.bases[board.rank] + peer * _LINE for peer in range(size) if peer != board.rank]
        made: DeviceBoard | None = None
        refusal = ""
        try:
            made = cls(device, board, memory, transport.share, words, device.signals(words, tell, hear))
        except TransportError as error:
            refusal = f"rank {board.members[board.rank]}: {error}"
        _agree(gather, refusal)
        assert made is not None
        deadline = time.monotonic() + FIRST_MEETING

        def look() -> None:
            on_wait()
            if time.monotonic() > deadline:
                raise StallError("")

        made.meet()
        try:
            wait_for(device.current().record(), look)
        except StallError:
            refusal = f"rank {made.rank}: its stream did not meet the others within {FIRST_MEETING} s"
            made.release()
        _agree(gather, refusal)
        made.by_host = not (all(gather(ipc)) and made._is_reached(gather))
        return made

    def _is_reached(self, gather: Gather) -> bool:
        """Return whether all devices can address each other's memory. Collective."""
        try:
            self.device.share(_PAGE, self.rank, gather).close()
        except OutOfReachError as error:
            level = logging.WARNING if self.rank == 0 else logging.DEBUG
            log.log(level, "devices exchange data through memory of the host: %s", str(error))
            return False
        return True

    def meet(self) -> None:
        """Queue: what follows on this stream is behind what all ranks' streams had done when they came here."""
        self._number = (self._number + 1) % _NUMBERS  # it goes round as 32 bits do
        self._signals.meet(self._number)

    def beside(self, run: Callable[[], Value]) -> tuple[Value, Event]:
        """Let `run` queue beside this stream, behind what that has been told so far.

        Returns its value, and the event behind what it has queued.
        """
        self._aside.wait(self.device.current().record())
        with self.device.using(self._aside):
            return run(), self._aside.record()

    def is_same(self, number: int, on_wait: WaitHook) -> bool:
        """Return whether all ranks have given the same number. The hosts meet. Collective."""
        return self._board.meet(number, on_wait)

    def find(self, array: DeviceArray) -> tuple[int, list[int]]:
        """Return (its place, the addresses of all ranks' arrays there) of one in symmetric memory, else (0, [])."""
        return self._memory.find(array.address, array.nbytes) or (0, [])

    def open_slots(self, nbytes: int, gather: Callable[[Any], list[Any]]) -> None:
        """Make two slots of so many bytes for each rank, unless they are there. Collective."""
        if self._slots is None:
            self._slots, self._slot_bytes = self._make_slots(2 * nbytes, gather), nbytes

    def _make_slots(self, nbytes: int, gather: Gather) -> SharedMemory:
        if not self.by_host:
            return self.device.share(nbytes, self.rank, gather)
        made, refusal = self._share(nbytes, gather), ""
        try:
            made = self.device.reach(made)
        except TransportError as error:
            refusal = f"rank {self._board.members[self.rank]}: {error}"
        try:
            _agree(gather, refusal)
        except TransportError:
            made.close()
            raise
        return made

    def part_bytes(self, parts: int) -> int:
        """Return how long a part of a slot is that is cut into so many."""
        return self._slot_bytes // parts // _ALIGNED * _ALIGNED

    def turn_slots(self) -> list[int]:
        """Return the addresses of all ranks' slots whose turn it is.

        What others read of this rank's they have read two turns later, if all ranks meet once in each.
        """
        assert self._slots is not None
        self._turn = 1 - self._turn
        return [base + self._turn * self._slot_bytes for base in self._slots.bases]

    def near(self, nbytes: int) -> int:
        """Return the address of memory of this rank's device for what follows until the next call asks for some."""
        if not self._near or self._near[-1].nbytes < nbytes:
            # What was made before stays: it may be in use on another stream than the one that would have it next.
            made = self.device.empty((max(nbytes, self._slot_bytes),), np.uint8)
            self._near.append(self.device.wrap(made, "memory of a board"))
        return self._near[-1].address

    def at(self, address: int, count: int, dtype: Any) -> DeviceArray:
        """Return memory of any rank's device as an array."""
        return DeviceArray(self.device, address, (count,), dtype, self)

    def release(self) -> None:
        """Let go this rank's stream, which waits for somebody that will not come. Its results are worth nothing."""
        number = (self._number + _AHEAD) % _NUMBERS
        for peer in range(self.size):
            ctypes.c_uint32.from_address(self._words.bases[self.rank] + peer * _LINE).value = number

    def leave(self, reason: str) -> None:
        """See `group.standing.Attached`. Without a reason what is under way may still end well."""
        if reason:
            self.release()

    def close(self) -> None:
        """Give everything back. Nothing queued may still use it."""
        self._signals.close()
        self._words.close()
        if self._slots is not None:
            self._slots.close()

    def halt(self) -> None:
        """See `group.standing.Attached`."""


def _agree(gather: Gather, refusal: str) -> None:
    if refusals := [told for told in gather(refusal) if told]:
        raise TransportError("; ".join(refusals))
