"""Links: send a stage's values over a channel, written directly into the receiver's memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.dtypes import Array, numpy_dtype
from commlib.errors import TransportError
from commlib.p2p.channels.channel import Channel
from commlib.pipeline.message import HEAD, NUMBER, TEXT_BYTES, MessageLayout
from commlib.pipeline.stage import StageValues, Tensors

NOTHING = 0
"""Instead of the number of a layout: the message for an empty microbatch."""

MOST_TERMS = 64
"""The number of layouts that the ends of a link remember: new ones replace the least recently used."""

_Views = tuple[Array, list[Array | None]]
"""A message's memory, referenced so that its ID stays unique, and the arrays in it."""

_HeldMessage = tuple[Array, Sequence[Any], bool]
"""A received message, the memories of the tensors made from it, and whether these are copies."""


class LayoutTable:
    """The layouts that both ends of a link have, with their numbers. The sending end maintains it."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._known: dict[Hashable, tuple[int, MessageLayout]] = {}  # the most recently used last
        self.number, self.terms = 0, MessageLayout((), "", HEAD)
        """The number and the layout of the next message."""

    def on(self, arrays: Sequence[Any], gradients: Sequence[bool], note: str) -> bytes:
        """Select the layout of the next message; return its text if the receiver does not have it."""
        key = (
            tuple([array if array is None else (array.dtype, array.shape) for array in arrays]),
            tuple(gradients),
            note,
        )
        entry, text = self._known.pop(key, None), b""
        if entry is None:
            number = len(self._known) + 1
            if number > MOST_TERMS:
                number = self._known.pop(next(iter(self._known)))[0]
            entry = number, MessageLayout.of(arrays, gradients, note, self._codec)
            text = entry[1].to_bytes()
        self._known[key] = entry
        self.number, self.terms = entry
        return text


class Sender:
    """The sending end of a link."""

    def __init__(self, channel: Channel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._layouts = LayoutTable(codec)
        self._terms: MessageLayout | None = None  # the layout of `_views`
        self._last_nbytes = 0  # bytes of the last message
        self._views: dict[int, _Views] = {}
        self._seed = 0

    def send(self, values: StageValues | None) -> None:
        """Send values, or None for an empty microbatch."""
        if values is None:
            self._put(_write_header(np.zeros(HEAD, np.uint8), NOTHING))
            return
        tensors = self._tensors
        arrays = [None if value is None else tensors.array(value) for value in values.tensors]
        gradients = [value is not None and tensors.wants_gradient(value) for value in values.tensors]
        text, terms = self._layouts.on(arrays, gradients, values.note), self._layouts.terms
        if terms is not self._terms:
            self._terms = terms
            self._views.clear()
        message, views = self._message(terms.nbytes + len(text))
        _write_header(message, self._layouts.number, text)
        for piece, view, array in zip(terms.pieces, views, arrays, strict=True):
            if piece is None or view is None or array is None:
                continue
            if piece.coded and self._codec is not None:
                self._seed += 1
                view[:] = encode(self._codec, np.ascontiguousarray(array), seed=self._seed)
            else:
                np.copyto(view, array)
        self._put(message)

    def _message(self, nbytes: int) -> _Views:
        """Return memory for `nbytes` bytes, the receiver's if possible, and the arrays in it."""
        message = self._channel.buffer(None if nbytes == self._last_nbytes else nbytes)
        views = self._views.get(id(message))
        if views is None:
            if len(self._views) > self._channel.depth:  # memory that changes each time is not cached
                self._views.clear()
            views = self._views[id(message)] = message, self._layouts.terms.views(message)
        return views

    def _put(self, message: Array) -> None:
        self._channel.send(message)
        self._last_nbytes = len(message)


def _write_header(message: Array, number: int, text: bytes = b"") -> Array:
    """Write the header of a message, and the text at its end; return the message."""
    head = message[:HEAD].view(np.int64)
    head[NUMBER], head[TEXT_BYTES] = number, len(text)
    if text:
        message[-len(text) :] = np.frombuffer(text, np.uint8)
    return message


class Receiver:
    """The receiving end of a link.

    Values use the memory of messages, unless a layer, a hook or a loss keeps them. The first run detects this, on
    copies; if one starts to keep values later, `release` detects it.
    """

    def __init__(self, channel: Channel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._known: dict[int, MessageLayout] = {}
        self._views: dict[int, tuple[MessageLayout, _Views]] = {}
        self._copies, self._is_used = True, False
        self.copied = 0
        """The number of messages copied in this run."""

    def begin(self) -> None:
        """Begin a run."""
        self.copied = 0

    def end(self) -> None:
        """End a run: if no values were kept in it, the next one need not copy."""
        self._copies = self._is_used

    def recv(self) -> tuple[StageValues | None, _HeldMessage | None]:
        """Wait for the next values; return them, or None for an empty microbatch, and the argument for `release`."""
        message = self._channel.recv()
        head = message[:HEAD].view(np.int64)
        number, text_bytes = int(head[NUMBER]), int(head[TEXT_BYTES])
        if number == NOTHING:
            self._channel.release(message)
            return None, None
        if text_bytes:
            self._known[number] = MessageLayout.read(message[-text_bytes:].tobytes())
        values = self._values(number, message)
        if self._copies and self._is_used:
            return values, (message, (), True)
        memories = [self._tensors.memory(value) for value in values.tensors if value is not None]
        return values, (message, [memory for memory in memories if memory is not None], self._copies)

    def release(self, received: _HeldMessage | None) -> None:
        """Release the memory of values that are no longer needed."""
        if received is None:
            return
        message, memories, is_copied = received
        for memory in memories:
            if self._tensors.is_used(memory):
                self._is_used = True
                if not is_copied:
                    self._tensors.move(memory)
        self._copies = self._copies or self._is_used
        self._channel.release(message)

    def _values(self, number: int, message: Array) -> StageValues:
        terms = self._known.get(number)
        if terms is None:
            raise TransportError(f"{self._channel.text}: received a message with the unknown layout {number}")
        views = self._views.get(id(message))
        if views is None or views[0] is not terms or views[1][0] is not message:
            if len(self._views) > 2 * self._channel.depth:
                self._views.clear()
            views = self._views[id(message)] = terms, (message, terms.views(message))
        values: list[Any] = []
        self.copied += self._copies
        for piece, view in zip(terms.pieces, views[1][1], strict=True):
            if piece is None or view is None:
                values.append(None)
                continue
            if piece.coded and self._codec is not None:
                view = decode(self._codec, view, np.empty(piece.shape, numpy_dtype(piece.dtype)))
            elif self._copies:
                view = view.copy()
            values.append(self._tensors.tensor(view, wants_gradient=piece.gradient))
        return StageValues(values, terms.note)
