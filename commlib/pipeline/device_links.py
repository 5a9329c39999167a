"""Device links: send a stage's values from one device to another; the host sends only their layout.

The number of the layout, and the text of a new one, accompany the message on the host, so the receiver's host need not
wait for its device to read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.devices.array import DeviceArray
from commlib.devices.copies import copy_to_device
from commlib.dtypes import numpy_dtype
from commlib.errors import TransportError
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.pipeline.links import NOTHING, LayoutTable
from commlib.pipeline.message import MessageLayout
from commlib.pipeline.stage import StageValues, Tensors


class DeviceSender:
    """The sending end of a link. It writes values into memory that the other device reads."""

    def __init__(self, channel: DeviceChannel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._device = channel.device
        self._layouts = LayoutTable(codec)
        self._seed = 0

    def send(self, values: StageValues | None) -> None:
        """Send values, or None for an empty microbatch."""
        if values is None:
            self._channel.send(self._device.empty((0,), np.uint8), tag=NOTHING)
            return
        tensors = self._tensors
        arrays = [None if value is None else tensors.read(value) for value in values.tensors]
        gradients = [value is not None and tensors.wants_gradient(value) for value in values.tensors]
        text = self._layouts.on(arrays, gradients, values.note)
        terms = self._layouts.terms
        buffer = self._channel.buffer(terms.nbytes)
        message = self._device.wrap(buffer, "send")
        for piece, array in zip(terms.pieces, arrays, strict=True):
            if piece is not None and array is not None and piece.nbytes:
                source = self._encoded(array) if piece.coded else self._bytes_of(array)
                self._device.copy(message[piece.start : piece.start + piece.nbytes], source)
        self._channel.send(buffer, tag=self._layouts.number, note=text)

    def _encoded(self, array: Any) -> Any:
        assert self._codec is not None
        self._seed += 1
        local = copy_to_device(array, self._device)
        return encode(self._codec, local, seed=self._seed)

    def _bytes_of(self, array: Any) -> Any:
        """Return the bytes of an array; for a host array, a staging copy that the device may read later."""
        if type(array) is DeviceArray:
            return array.reshape(-1).view(np.uint8)
        block = self._device.staging(array.nbytes)
        block[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return block


class DeviceReceiver:
    """The receiving end of a link. Values have separate memory, so they may be kept."""

    copied = 0

    def __init__(self, channel: DeviceChannel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._device = channel.device
        self._known: dict[int, MessageLayout] = {}

    def begin(self) -> None:
        """Begin a run."""

    def end(self) -> None:
        """End a run."""

    def recv(self) -> tuple[StageValues | None, Any]:
        """Wait for the next values; return them, or None for an empty microbatch, and the argument for `release`."""
        message, number, text = self._channel.recv_message()
        if number == NOTHING:
            self._channel.release(message)
            return None, None
        if text:
            self._known[number] = MessageLayout.read(text)
        terms = self._known.get(number)
        if terms is None:
            raise TransportError(f"{self._channel.text}: received a message with the unknown layout {number}")
        values: list[Any] = []
        for piece, view in zip(terms.pieces, terms.views(self._device.wrap(message, "recv")), strict=True):
            if piece is None or view is None:
                values.append(None)
                continue
            if piece.coded and self._codec is not None:
                out = self._device.wrap(self._device.empty(piece.shape, numpy_dtype(piece.dtype)), "recv")
                view = decode(self._codec, view, out)
            values.append(self._tensors.tensor(view, wants_gradient=piece.gradient))
        return StageValues(values, terms.note), message

    def release(self, message: Any) -> None:
        """Release the memory of values that are no longer needed."""
        if message is not None:
            self._channel.release(message)
