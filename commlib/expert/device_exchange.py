"""Device rows: send them to the other ranks, encoded or not."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.devices.array import DeviceArray

# Payloads begin at multiples of this many bytes.
_ALIGNED = 16


class DeviceExchange:
    """Exchange of device rows. codec: fixed-length, for floats, or None. Queued on the current stream; collective."""

    def __init__(self, comm: Communicator, codec: Codec | None) -> None:
        self._comm, self._codec = comm, codec

    def exchange(self, rows: DeviceArray, sends: list[int], takes: list[int]) -> DeviceArray:
        """Send sends[i] rows to rank i, not encoded; return the rows received, takes[i] of them from rank i."""
        if self._comm.size == 1:
            return rows
        received, _ = self._comm.all_to_all_v(rows, sends, takes=takes)
        return rows.device.wrap(received, "experts")  # type: ignore[no-any-return]

    def move(self, rows: DeviceArray, sends: list[int], takes: list[int]) -> DeviceArray:
        """Exchange rows like `exchange`; with a codec, encode the rows for each rank separately."""
        codec = self._codec
        if codec is None:
            return self.exchange(rows, sends, takes)
        width = rows.shape[1]
        payloads = [codec.payload_bytes(count * width) if count else 0 for count in takes]
        lengths, wanted = ([_payload_room(codec, count * width) for count in each] for each in (sends, takes))
        message = rows.empty((sum(lengths),), np.uint8)
        for count, start, at in zip(sends, _starts(sends), _starts(lengths), strict=True):
            if count:
                payload = encode(codec, rows[start : start + count])
                message[at : at + len(payload)] = payload
        received = self.exchange(message, lengths, wanted)
        result = rows.empty((sum(takes), width), rows.dtype)
        for count, start, at, length in zip(takes, _starts(takes), _starts(wanted), payloads, strict=True):
            if count:
                decode(codec, received[at : at + length], result[start : start + count])
        return result


def _payload_room(codec: Codec, count: int) -> int:
    return -(-codec.payload_bytes(count) // _ALIGNED) * _ALIGNED if count else 0


def _starts(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
