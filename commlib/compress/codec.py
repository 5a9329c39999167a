"""Codec: encode float32 arrays in fewer bytes, for reductions, pipeline links and exchanges of activations."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from commlib.dtypes import Array


def uses_seed(codec: Codec) -> bool:
    """Return whether a codec's payload depends on the seed."""
    return bool(getattr(codec, "draws", False))


@runtime_checkable
class Codec(Protocol):
    """Encodes contiguous 1-D float32 arrays as bytes, and decodes them. Immutable and stateless.

    The arrays of one call are on one device: numpy arrays, or `DeviceArray`s, for which work is queued.

    Empty arrays are allowed, and zeros decode to zeros. An infinity or NaN makes the decoded value non-finite, never a
    wrong number. The same values and seed give the same bytes on every rank.
    """

    @property
    def name(self) -> str:
        """Name for `codec_of`, such as "int8" or "topk:ratio=0.01"."""
        ...

    @property
    def align(self) -> int:
        """Preferred multiple for cuts of arrays, in elements."""
        ...

    @property
    def feedback(self) -> bool:
        """Whether the loss should be added to the next array when the same quantity is sent repeatedly."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether a payload's length depends only on the number of elements."""
        ...

    def payload_bytes(self, count: int) -> int:
        """Return the payload length of `count` elements in bytes; the maximum if the length is not fixed."""
        ...

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Write `x` (float32) to `payload` (uint8) and return the number of bytes used.

        `residual=(before, after)` holds two arrays like `x`, which may be the same array. Then x + before is encoded,
        and the loss, (x + before) - decoded, is written to `after`. Codecs that round or choose at random use `seed`,
        and have an attribute `uses_seed` that is True.
        """
        ...

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode `payload` into `out` (float32), or add the values to it. The payload may be longer than needed."""
        ...
