"""Codec: encode float32 arrays in fewer bytes, for reductions, pipeline edges and exchanges of activations."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from commlib.dtypes import Array


def draws(codec: Codec) -> bool:
    """Tell whether what a codec sends depends on the seed."""
    return bool(getattr(codec, "draws", False))


@runtime_checkable
class Codec(Protocol):
    """Turns contiguous 1-D float32 arrays into bytes and back. Immutable and stateless: one object serves all.

    The arrays of one call are on one device: numpy's, or `DeviceArray`, where work is queued and done later.

    Empty arrays are allowed, zeros decode to zeros, and what has an infinity or NaN decodes to something that is not
    finite, never to a wrong number. The same values and seed give the same bytes on every rank.
    """

    @property
    def name(self) -> str:
        """What `codec_of` takes, such as "int8" or "topk:ratio=0.01"."""
        ...

    @property
    def align(self) -> int:
        """Elements: arrays are best cut at multiples of it."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether what is lost should be added to the next array, where the same quantity is sent again and again."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether a payload's length depends on the number of elements alone."""
        ...

    def payload_bytes(self, count: int) -> int:
        """Return the length of the payload of `count` elements in bytes; if it is not fixed, the most it can be."""
        ...

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Write `x` (float32) to `payload` (uint8) and return how many bytes were used.

        With `residual=(before, after)`, arrays like `x` that may be the same one, x + before is encoded, and what was
        lost, (x + before) - decoded, goes to `after`. Codecs that round or choose at random do so by `seed`, and say
        so by an attribute `draws` that is true.
        """
        ...

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Write what `payload` stands for to `out` (float32), or add it. The payload may be longer than needed."""
        ...
