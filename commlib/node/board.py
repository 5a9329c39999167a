"""Board: let the ranks of one node meet, compare their calls, and leave notes for each other.

The protocols are compiled (`kernels.node`); this is the memory they work on and the Python around a long wait.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commlib.buffers.peer_reading import Probe, can_read
from commlib.kernels.host import node as kernels
from commlib.kernels.host.uneven import note_bytes
from commlib.transport.base import Gather, Transport, WaitHook

Call = Any  # an int64 array of kernels.CALL_FIELDS fields
Kernel = Callable[[int], int]  # takes the address of what it works on

_PATIENCE = [kernels.SPINS, kernels.YIELDS, kernels.NAPS, kernels.NAP_MICROSECONDS]  # what a wait depends on

_TEXT_BYTES = 1024
_PRESENT, _LEFT = 1, 2

# What a rank's status holds: whether it is there, its process, its probe, and whether it can read all others' memory.
_THERE, _PROCESS, _PROBE, _SECRET, _READS = range(5)
LEFT = "has shut commlib down or left the program"

# How long one kernel call waits before it comes back to Python to look around: spins, yields, then 1 ms of naps.
_YIELDS, _NAPS, _NAP_MICROSECONDS = 2000, 20, 50

# After so many of those, some 0.2 s, naps are fewer and longer: whoever is waited for is busy with something else, and
# a nap costs 15 us of a core.
_MANY_WAITS, _LONG_NAPS, _LONG_NAP_MICROSECONDS = 150, 5, 2000


def _as_array(address: int, nbytes: int) -> Any:
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _process_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class NodeBoard:
    """Let the ranks of one group meet that are on one node.

    `spins` is how often a rank polls before it yields its core. `slot_bytes` is the size of each rank's two slots.
    `peer_reads`: they may read each other's memory, if the system lets them.
    `members` are their ranks in the group, by which `late` and `absent` call them (default: all of the group).
    Collective to make, `gather` tells a rank's value to all of the node; then all ranks `enter`.
    """

    def __init__(
        self,
        transport: Transport,
        gather: Gather,
        *,
        slot_bytes: int,
        spins: int,
        members: Sequence[int] | None = None,
        peer_reads: bool = False,
    ) -> None:
        self._transport = transport
        self.members = tuple(members or range(transport.size))
        self.slot_bytes = slot_bytes
        self.rank, self.size, self.spins = transport.rank, transport.size, spins
        lines = self.size * kernels.LINE_BYTES  # those of rank 0's part are the board
        status = lines
        text = status + 64
        slots = text + _TEXT_BYTES
        self._memory = transport.share(slots + 2 * (slot_bytes + note_bytes(self.size)), gather)
        bases = self._memory.bases
        self._status = [_as_array(base + status, 64).view(np.int64) for base in bases]
        self._texts = [_as_array(base + text, _TEXT_BYTES) for base in bases]
        words = _as_array(bases[0], lines).view(np.int64).reshape(self.size, -1)
        self._arrived, self._given_up = words[:, kernels.ARRIVED // 8], words[:, kernels.GIVEN_UP // 8]
        self._given_up[self.rank] = kernels.NEVER
        self._slots = np.array([base + slots for base in bases], np.int64)
        self._control = np.zeros(kernels.CONTROL_FIELDS, np.int64)
        self._control[kernels.RANK] = self.rank
        self._control[kernels.SIZE] = self.size
        self._control[kernels.BOARD] = bases[0]
        self._control[kernels.SLOTS] = self._slots.ctypes.data
        self._control[kernels.SLOT_BYTES] = slot_bytes
        self._barrier = kernels.entry_point(kernels.barrier)
        self._meeting = self.new_call()[np.newaxis]
        self._meeting_address = self._meeting.ctypes.data
        self._probe = Probe()
        self._status[self.rank][: _SECRET + 1] = _PRESENT, os.getpid(), *self._probe.place
        self._watched = [False] * self.size
        self._peer_reads, self.reads_peers = peer_reads, False
        self.processes = np.zeros(self.size, np.int64)

    def enter(self, on_wait: WaitHook) -> None:
        """Wait until all ranks have made theirs. Collective."""
        self.meet(kernels.DONE, on_wait)
        # Ranks in another PID namespace cannot be seen, so their absence would mean nothing.
        self._watched = [_process_alive(int(status[_PROCESS])) for status in self._status]
        self.processes[:] = [status[_PROCESS] for status in self._status]
        if self._peer_reads:
            probes = [status[_PROCESS : _SECRET + 1].tolist() for status in self._status]
            self._status[self.rank][_READS] = all(can_read(*probe) for probe in probes)
            self.meet(kernels.DONE, on_wait)
            self.reads_peers = all(status[_READS] for status in self._status)

    @property
    def named_memory(self) -> bool:
        """Whether its ranks can share files only by names."""
        return bool(getattr(self._memory, "is_named", False))

    @property
    def epoch(self) -> int:
        """How often the ranks have met."""
        return int(self._control[kernels.EPOCH])

    @property
    def calls(self) -> int:
        """The number of the user's last call, the same on all ranks."""
        return int(self._control[kernels.CALLS])

    @calls.setter
    def calls(self, number: int) -> None:
        self._control[kernels.CALLS] = number

    def new_call(self) -> Call:
        """Return a blank call for the kernels."""
        call = np.zeros(kernels.CALL_FIELDS, np.int64)
        call[kernels.CONTROL] = self._control.ctypes.data
        call[kernels.SPINS] = self.spins
        call[kernels.YIELDS] = _YIELDS
        call[kernels.NAPS] = _NAPS
        call[kernels.NAP_MICROSECONDS] = _NAP_MICROSECONDS
        return call

    def resume(self, kernel: Kernel, argument: int, calls: Call, status: int, on_wait: WaitHook) -> int:
        """Go on with a kernel that returned `status`, calling `on_wait` between its waits; return its last status.

        calls: one or several, a row each, that the kernel works on.
        """
        if status == kernels.WAITING:
            patience = calls[:, _PATIENCE]
            calls[:, _PATIENCE[:2]] = 0  # a long wait must not burn the core
            waits = 0
            while status == kernels.WAITING:
                on_wait()
                self._transport.progress()  # a rank that comes later may first wait for a message with this one
                waits += 1
                if waits == _MANY_WAITS:
                    calls[:, _PATIENCE[2:]] = _LONG_NAPS, _LONG_NAP_MICROSECONDS
                status = kernel(argument)
            calls[:, _PATIENCE] = patience
        return status

    def meet(self, signature: int, on_wait: WaitHook) -> bool:
        """Wait for all ranks; return whether they all came with the same signature."""
        self._meeting[0, kernels.SIGNATURE] = signature
        status = self._barrier(self._meeting_address)
        if status != kernels.DONE:
            status = self.resume(self._barrier, self._meeting_address, self._meeting, status, on_wait)
        return status == kernels.DONE

    def exchange_texts(self, text: str, on_wait: WaitHook) -> list[str]:
        """Return every rank's text (cut at 1 kB). All ranks call it, at the same epoch."""
        self._write_text(text)
        self.meet(kernels.DONE, on_wait)
        texts = [self._read_text(rank) for rank in range(self.size)]
        self.meet(kernels.DONE, on_wait)
        return texts

    def _write_text(self, text: str) -> None:
        data = text.encode()[: _TEXT_BYTES - 1]
        self._texts[self.rank][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)

    def _read_text(self, rank: int) -> str:
        return bytes(self._texts[rank]).partition(b"\0")[0].decode(errors="replace")

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's epoch."""
        return [self.members[rank] for rank in np.flatnonzero(self._arrived < self._control[kernels.EPOCH])]

    def is_ahead(self) -> bool:
        """Return whether a rank has come to a meeting that this rank has not come to."""
        return bool(self._arrived.max() > self._control[kernels.EPOCH])

    def fail(self) -> None:
        """Let every later kernel return BROKEN: this rank is out of step with the others.

        Where all have come others may still end what this rank has done. Nobody takes from it what it has published for
        those that have not come yet.
        """
        epoch = int(self._control[kernels.EPOCH])
        counted = epoch + bool(self._arrived.min() >= epoch)
        self._given_up[self.rank] = min(int(self._given_up[self.rank]), counted)
        self._control[kernels.FAILED] = 1

    def leave(self, reason: str = LEFT) -> None:
        """Tell the others that this rank comes to no meeting any more; its first reason counts. Never blocks."""
        if self._status[self.rank][_THERE] != _LEFT:
            self._write_text(reason)
            self._status[self.rank][_THERE] = _LEFT

    def absent(self) -> dict[int, str]:
        """Return the ranks that will never come, each with the reason."""
        gone = {}
        for rank, (status, watched) in enumerate(zip(self._status, self._watched, strict=True)):
            member = self.members[rank]
            if status[_THERE] == _LEFT:
                gone[member] = self._read_text(rank)
            elif watched and not _process_alive(int(status[_PROCESS])):
                gone[member] = f"is dead (its process {int(status[_PROCESS])} is gone)"
        return gone

    def close(self) -> None:
        """Release the memory. Collective."""
        self._status, self._texts = [], []
        self._arrived = self._given_up = np.zeros(0, np.int64)
        self._memory.close()
