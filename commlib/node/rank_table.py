"""Rank table: each rank's presence, process and text, in shared memory of a node."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commlib.buffers.peer_reading import Probe, can_read

_STATUS_BYTES, _TEXT_BYTES = 64, 1024
RECORD_BYTES = _STATUS_BYTES + _TEXT_BYTES

_PRESENT, _LEFT = 1, 2

# Fields of a rank's status: presence, process, probe (address, secret), and whether it can read all peers' memory.
_THERE, _PROCESS, _PROBE, _SECRET, _READS = range(5)
LEFT = "has shut commlib down or left the program"


def view_memory(address: int, nbytes: int) -> Any:
    """Return the bytes at an address."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _process_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class RankTable:
    """The records of a node's ranks, each of RECORD_BYTES at the address of its rank. Each rank writes its own."""

    def __init__(self, addresses: Sequence[int], rank: int) -> None:
        self._rank = rank
        self._status = [view_memory(address, _STATUS_BYTES).view(np.int64) for address in addresses]
        self._texts = [view_memory(address + _STATUS_BYTES, _TEXT_BYTES) for address in addresses]
        self._probe = Probe()
        self._status[rank][: _SECRET + 1] = _PRESENT, os.getpid(), *self._probe.place
        self._watched = [False] * len(addresses)

    def watch_processes(self) -> list[int]:
        """Watch the processes of the ranks, which have all written their records; return their numbers."""
        processes = [int(status[_PROCESS]) for status in self._status]
        # Processes in another PID namespace are invisible, so do not watch them.
        self._watched = [_process_alive(process) for process in processes]
        return processes

    def note_reads(self) -> None:
        """Write whether this rank can read the memory of all ranks."""
        probes = [status[_PROCESS : _SECRET + 1].tolist() for status in self._status]
        self._status[self._rank][_READS] = all(can_read(*probe) for probe in probes)

    @property
    def all_read(self) -> bool:
        """Whether each rank can read the memory of all ranks: see `note_reads`."""
        return all(status[_READS] for status in self._status)

    def write_text(self, text: str) -> None:
        """Write this rank's text, cut at 1 kB."""
        data = text.encode()[: _TEXT_BYTES - 1]
        self._texts[self._rank][: len(data) + 1] = np.frombuffer(data + b"\0", np.uint8)

    def read_text(self, rank: int) -> str:
        """Return the text of a rank."""
        return bytes(self._texts[rank]).partition(b"\0")[0].decode(errors="replace")

    def texts(self) -> list[str]:
        """Return the texts of all ranks."""
        return [self.read_text(rank) for rank in range(len(self._texts))]

    def leave(self, reason: str) -> None:
        """Write that this rank has left; the first reason counts."""
        if self._status and self._status[self._rank][_THERE] != _LEFT:
            self.write_text(reason)
            self._status[self._rank][_THERE] = _LEFT

    def absent(self) -> dict[int, str]:
        """Return the ranks that have left or whose process is gone, each with the reason."""
        reasons = {}
        for rank, (status, watched) in enumerate(zip(self._status, self._watched, strict=True)):
            if status[_THERE] == _LEFT:
                reasons[rank] = self.read_text(rank)
            elif watched and not _process_alive(int(status[_PROCESS])):
                reasons[rank] = f"is dead (its process {int(status[_PROCESS])} is gone)"
        return reasons

    def close(self) -> None:
        """Drop the memory."""
        self._status, self._texts, self._watched = [], [], []
