"""Board: shared memory in which the ranks of one node synchronise, compare their calls, and exchange texts.

The protocols are compiled (`kernels.node`); this module has their memory and the Python code around long waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commlib.kernels.host import node as kernels
from commlib.kernels.host.uneven_exchange import note_bytes
from commlib.node.rank_table import LEFT, RECORD_BYTES, RankTable, view_memory
from commlib.transport.base import Gather, Transport, WaitHook
from commlib.transport.naps import kernel_naps

KernelCall = Any  # an int64 array of kernels.CALL_FIELDS fields
Kernel = Callable[[int], int]  # takes the address of its argument

_PATIENCE = [kernels.SPINS, kernels.YIELDS, kernels.NAPS, kernels.NAP_MICROSECONDS]  # the fields that control a wait

# The wait of one kernel call before it returns to Python for its checks: spins, these yields, then naps.
_YIELDS = 2000


class NodeBoard:
    """The board of a group's ranks on one node.

    spins: the number of polls before a rank yields its core. slot_bytes: the size of each rank's two slots.
    peer_reads: ranks may read each other's memory, if the system allows it. members: their ranks in the group, which
    `late` and `absent` return (default: all of the group). gather: all-gathers a value of each rank of the node.
    The constructor is collective; then all ranks call `enter`.
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
        self.rank, self.size = transport.rank, transport.size
        lines = self.size * kernels.LINE_BYTES  # the lines in rank 0's memory are the board
        slots = lines + RECORD_BYTES
        self._memory = transport.share(slots + 2 * (slot_bytes + note_bytes(self.size)), gather)
        bases = self._memory.bases
        self._table = RankTable([base + lines for base in bases], self.rank)
        words = view_memory(bases[0], lines).view(np.int64).reshape(self.size, -1)
        self._arrived, self._abandoned = words[:, kernels.ARRIVED // 8], words[:, kernels.ABANDONED // 8]
        self._abandoned[self.rank] = kernels.NEVER
        self._slots = np.array([base + slots for base in bases], np.int64)
        self._control = np.zeros(kernels.CONTROL_FIELDS, np.int64)
        self._control[kernels.RANK] = self.rank
        self._control[kernels.SIZE] = self.size
        self._control[kernels.BOARD] = bases[0]
        self._control[kernels.SLOTS] = self._slots.ctypes.data
        self._control[kernels.SLOT_BYTES] = slot_bytes
        self._blank_call = np.zeros(kernels.CALL_FIELDS, np.int64)
        self._blank_call[kernels.CONTROL] = self._control.ctypes.data
        self._blank_call[_PATIENCE] = spins, _YIELDS, *kernel_naps(0)
        self._barrier = kernels.entry_point(kernels.barrier)
        self._sync_call = self.new_call()[np.newaxis]
        self._sync_address = self._sync_call.ctypes.data
        self._peer_reads, self.reads_peers = peer_reads, False
        self.processes = np.zeros(self.size, np.int64)

    def enter(self, on_wait: WaitHook) -> None:
        """Wait until all ranks have created their boards. Collective."""
        self.barrier(kernels.DONE, on_wait)
        self.processes[:] = self._table.watch_processes()
        if self._peer_reads:
            self._table.note_reads()
            self.barrier(kernels.DONE, on_wait)
            self.reads_peers = self._table.all_read

    @property
    def named_memory(self) -> bool:
        """Whether its ranks can share only named files."""
        return bool(getattr(self._memory, "is_named", False))

    @property
    def epoch(self) -> int:
        """The number of synchronisations of the ranks so far."""
        return int(self._control[kernels.EPOCH])

    @property
    def calls(self) -> int:
        """The number of the user's last call, the same on all ranks."""
        return int(self._control[kernels.CALLS])

    @calls.setter
    def calls(self, number: int) -> None:
        self._control[kernels.CALLS] = number

    def new_call(self) -> KernelCall:
        """Return a blank call for the kernels."""
        return self._blank_call.copy()

    def resume(self, kernel: Kernel, argument: int, calls: KernelCall, status: int, on_wait: WaitHook) -> int:
        """Continue a kernel that returned `status`, calling `on_wait` between its waits; return its last status.

        calls: the calls of the kernel, one row each.
        """
        if status == kernels.WAITING:
            patience = calls[:, _PATIENCE]
            calls[:, _PATIENCE[:2]] = 0  # a long wait must not burn the core
            start = time.monotonic()
            while status == kernels.WAITING:
                on_wait()
                self._transport.progress()  # a late rank may first wait for a message to or from this one
                calls[:, _PATIENCE[2:]] = kernel_naps(time.monotonic() - start)
                status = kernel(argument)
            calls[:, _PATIENCE] = patience
        return status

    def barrier(self, signature: int, on_wait: WaitHook) -> bool:
        """Wait for all ranks; return whether all gave the same signature. Collective."""
        self._sync_call[0, kernels.SIGNATURE] = signature
        status = self._barrier(self._sync_address)
        if status != kernels.DONE:
            status = self.resume(self._barrier, self._sync_address, self._sync_call, status, on_wait)
        return status == kernels.DONE

    def exchange_texts(self, text: str, on_wait: WaitHook) -> list[str]:
        """Return every rank's text (cut at 1 kB). Collective, at the same epoch."""
        self._table.write_text(text)
        self.barrier(kernels.DONE, on_wait)
        texts = self._table.texts()
        self.barrier(kernels.DONE, on_wait)
        return texts

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's epoch."""
        return [self.members[rank] for rank in np.flatnonzero(self._arrived < self._control[kernels.EPOCH])]

    def is_ahead(self) -> bool:
        """Return whether a rank has reached a later epoch than this rank."""
        return bool(self._arrived.max() > self._control[kernels.EPOCH])

    def fail(self) -> None:
        """Make every later kernel return BROKEN, because this rank is out of step with the others.

        If all ranks have arrived at the current epoch, they may still complete it with this rank's data. Otherwise no
        rank reads the data that this rank has published in it.
        """
        epoch = int(self._control[kernels.EPOCH])
        counted = epoch + bool(self._arrived.min() >= epoch)
        self._abandoned[self.rank] = min(int(self._abandoned[self.rank]), counted)
        self._control[kernels.FAILED] = 1

    def leave(self, reason: str = LEFT) -> None:
        """Notify the other ranks that this rank synchronises no more; the first reason counts. Never blocks."""
        self._table.leave(reason)

    def absent(self) -> dict[int, str]:
        """Return the ranks that will never arrive, each with the reason."""
        return {self.members[rank]: reason for rank, reason in self._table.absent().items()}

    def close(self) -> None:
        """Release the memory. Collective."""
        self._table.close()
        self._arrived = self._abandoned = np.zeros(0, np.int64)
        self._memory.close()
