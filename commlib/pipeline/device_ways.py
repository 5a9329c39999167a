"""Ways between devices: a stage's values go from one device to another, and the host tells only what they are.

What they are, the number of the terms and where those are new their text, goes along with the message on the host: the
receiver's host need not wait for its device to read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.devices.array import DeviceArray
from commlib.devices.copies import brought
from commlib.dtypes import numpy_dtype
from commlib.errors import TransportError
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.pipeline.message import Terms
from commlib.pipeline.stage import Tensors, Values
from commlib.pipeline.ways import NOTHING, Agreed


class DeviceSender:
    """The sending end of a way. It writes values into the memory from which the other device reads them."""

    def __init__(self, channel: DeviceChannel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._device = channel.device
        self._agreed = Agreed(codec)
        self._seed = 0

    def send(self, values: Values | None) -> None:
        """Send values, or None for a microbatch that has none."""
        if values is None:
            self._channel.send(self._device.empty((0,), np.uint8), tag=NOTHING)
            return
        tensors = self._tensors
        arrays = [None if value is None else tensors.read(value) for value in values.tensors]
        gradients = [value is not None and tensors.wants_gradient(value) for value in values.tensors]
        text = self._agreed.on(arrays, gradients, values.note)
        terms = self._agreed.terms
        buffer = self._channel.buffer(terms.nbytes)
        message = self._device.wrap(buffer, "send")
        for piece, array in zip(terms.pieces, arrays, strict=True):
            if piece is not None and array is not None and piece.nbytes:
                source = self._encoded(array) if piece.coded else self._bytes_of(array)
                self._device.copy(message[piece.start : piece.start + piece.nbytes], source)
        self._channel.send(buffer, tag=self._agreed.number, note=text)

    def _encoded(self, array: Any) -> Any:
        assert self._codec is not None
        self._seed += 1
        there = brought(array, self._device)
        return encode(self._codec, there, seed=self._seed)

    def _bytes_of(self, array: Any) -> Any:
        """Return the bytes of an array; of the host's, a copy that the device may read later."""
        if type(array) is DeviceArray:
            return array.reshape(-1).view(np.uint8)
        block = self._device.staging(array.nbytes)
        block[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return block


class DeviceReceiver:
    """The receiving end of a way. Values have memory of their own: whoever keeps them may."""

    copied = 0

    def __init__(self, channel: DeviceChannel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._device = channel.device
        self._known: dict[int, Terms] = {}

    def begin(self) -> None:
        """Begin a run."""

    def end(self) -> None:
        """End a run."""

    def recv(self) -> tuple[Values | None, Any]:
        """Wait for the next values; return them, or None if there are none, and what `release` takes."""
        message, number, text = self._channel.recv_message()
        if number == NOTHING:
            self._channel.release(message)
            return None, None
        if text:
            self._known[number] = Terms.read(text)
        terms = self._known.get(number)
        if terms is None:
            raise TransportError(f"{self._channel.text}: a message of terms {number}, which were not sent before")
        values: list[Any] = []
        for piece, view in zip(terms.pieces, terms.views(self._device.wrap(message, "recv")), strict=True):
            if piece is None or view is None:
                values.append(None)
                continue
            if piece.coded and self._codec is not None:
                out = self._device.wrap(self._device.empty(piece.shape, numpy_dtype(piece.dtype)), "recv")
                view = decode(self._codec, view, out)
            values.append(self._tensors.tensor(view, wants_gradient=piece.gradient))
        return Values(values, terms.note), message

    def release(self, message: Any) -> None:
        """Hand back the memory of values that are needed no more."""
        if message is not None:
            self._channel.release(message)
