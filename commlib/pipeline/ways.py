"""Ways: send a stage's values to another one over a channel, written straight into the memory that it receives into."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.dtypes import Array, numpy_dtype
from commlib.errors import TransportError
from commlib.p2p.channels.channel import Channel
from commlib.pipeline.message import HEAD, NUMBER, TEXT_BYTES, Terms
from commlib.pipeline.stage import Tensors, Values

NOTHING = 0
"""The number, instead of that of terms, of a message for a microbatch that is empty."""

MOST_TERMS = 64
"""How many different terms the ends of a way remember: new ones take the place of those used longest ago."""

_Views = tuple[Array, list[Array | None]]
"""A message's memory, kept so that it is no other's, and the arrays in it."""

_Held = tuple[Array, Sequence[Any], bool]
"""A message that was received, the memories of the tensors that were made of it, and whether these are copies."""


class Agreed:
    """What the two ends of a way know of its messages: which terms have which number. Kept by the sending end."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._known: dict[Hashable, tuple[int, Terms]] = {}  # the last used at the end
        self.number, self.terms = 0, Terms((), "", HEAD)
        """Those of what is sent next."""

    def on(self, arrays: Sequence[Any], gradients: Sequence[bool], note: str) -> bytes:
        """Find the terms of what is sent next; return their text if the other side does not know them."""
        key = (
            tuple([array if array is None else (array.dtype, array.shape) for array in arrays]),
            tuple(gradients),
            note,
        )
        known, text = self._known.pop(key, None), b""
        if known is None:
            number = len(self._known) + 1
            if number > MOST_TERMS:
                number = self._known.pop(next(iter(self._known)))[0]
            known = number, Terms.of(arrays, gradients, note, self._codec)
            text = known[1].to_bytes()
        self._known[key] = known
        self.number, self.terms = known
        return text


class Sender:
    """The sending end of a way."""

    def __init__(self, channel: Channel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._agreed = Agreed(codec)
        self._terms: Terms | None = None  # those of `_views`
        self._last_sent = 0  # bytes of the last message
        self._views: dict[int, _Views] = {}
        self._seed = 0

    def send(self, values: Values | None) -> None:
        """Send values, or None for a microbatch that has none."""
        if values is None:
            self._put(_head(np.zeros(HEAD, np.uint8), NOTHING))
            return
        tensors = self._tensors
        arrays = [None if value is None else tensors.array(value) for value in values.tensors]
        gradients = [value is not None and tensors.wants_gradient(value) for value in values.tensors]
        text, terms = self._agreed.on(arrays, gradients, values.note), self._agreed.terms
        if terms is not self._terms:
            self._terms = terms
            self._views.clear()
        message, views = self._message(terms.nbytes + len(text))
        _head(message, self._agreed.number, text)
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
        """Return memory for so many bytes, if possible that of the other side; and the arrays in it."""
        message = self._channel.buffer(None if nbytes == self._last_sent else nbytes)
        found = self._views.get(id(message))
        if found is None:
            if len(self._views) > self._channel.depth:  # memory that changes each time is not kept
                self._views.clear()
            found = self._views[id(message)] = message, self._agreed.terms.views(message)
        return found

    def _put(self, message: Array) -> None:
        self._channel.send(message)
        self._last_sent = len(message)


def _head(message: Array, number: int, text: bytes = b"") -> Array:
    """Write the head of a message, and the text at its end; return it."""
    head = message[:HEAD].view(np.int64)
    head[NUMBER], head[TEXT_BYTES] = number, len(text)
    if text:
        message[-len(text) :] = np.frombuffer(text, np.uint8)
    return message


class Receiver:
    """The receiving end of a way.

    Values lie in the memory of messages, unless somebody keeps them: a layer, a hook, a loss. The first run finds out,
    on copies; where somebody begins later, that is seen when the memory is handed back.
    """

    def __init__(self, channel: Channel, tensors: Tensors, codec: Codec | None) -> None:
        self._channel, self._tensors, self._codec = channel, tensors, codec
        self._known: dict[int, Terms] = {}
        self._views: dict[int, tuple[Terms, _Views]] = {}
        self._copies, self._is_kept = True, False
        self.copied = 0
        """How many messages of this run were copied."""

    def begin(self) -> None:
        """Begin a run."""
        self.copied = 0

    def end(self) -> None:
        """End a run: what was not kept in it need not be copied in the next one."""
        self._copies = self._is_kept

    def recv(self) -> tuple[Values | None, _Held | None]:
        """Wait for the next values; return them, or None if there are none, and what `release` takes."""
        message = self._channel.recv()
        head = message[:HEAD].view(np.int64)
        number, text_bytes = int(head[NUMBER]), int(head[TEXT_BYTES])
        if number == NOTHING:
            self._channel.release(message)
            return None, None
        if text_bytes:
            self._known[number] = Terms.read(message[-text_bytes:].tobytes())
        values = self._values(number, message)
        if self._copies and self._is_kept:
            return values, (message, (), True)
        memories = [self._tensors.memory(value) for value in values.tensors if value is not None]
        return values, (message, [memory for memory in memories if memory is not None], self._copies)

    def release(self, held: _Held | None) -> None:
        """Hand back the memory of values that are needed no more."""
        if held is None:
            return
        message, memories, is_copied = held
        for memory in memories:
            if self._tensors.is_kept(memory):
                self._is_kept = True
                if not is_copied:
                    self._tensors.move(memory)
        self._copies = self._copies or self._is_kept
        self._channel.release(message)

    def _values(self, number: int, message: Array) -> Values:
        terms = self._known.get(number)
        if terms is None:
            raise TransportError(f"{self._channel.text}: a message of terms {number}, which were not sent before")
        known = self._views.get(id(message))
        if known is None or known[0] is not terms or known[1][0] is not message:
            if len(self._views) > 2 * self._channel.depth:
                self._views.clear()
            known = self._views[id(message)] = terms, (message, terms.views(message))
        values: list[Any] = []
        self.copied += self._copies
        for piece, view in zip(terms.pieces, known[1][1], strict=True):
            if piece is None or view is None:
                values.append(None)
                continue
            if piece.coded and self._codec is not None:
                view = decode(self._codec, view, np.empty(piece.shape, numpy_dtype(piece.dtype)))
            elif self._copies:
                view = view.copy()
            values.append(self._tensors.tensor(view, wants_gradient=piece.gradient))
        return Values(values, terms.note)
