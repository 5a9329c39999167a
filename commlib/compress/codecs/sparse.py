"""Sparse codecs: send a few elements of an array and their indices. All others count as zero.

Indices travel as gaps, in one byte each if one element in a hundred is sent. Both codecs need error feedback, which
delays the unsent elements instead of losing them (Stich et al. 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from commlib.compress.checks import check_decode, check_encode
from commlib.devices.arrays import device_of
from commlib.devices.host import HOST
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.protocol import SPARSE_HEADER, Value

VALUES: tuple[Value, ...] = ("float32", "float16", "bfloat16")
"""Dtypes in which values may travel."""


@dataclass(frozen=True, slots=True)
class TopK:
    """Sends the elements of largest magnitude, `ratio` of all, at least one; among equal ones, the first.

    The selection is exact. Zeros are not sent. Infinities and NaNs count as the largest. If there are any, only they
    are sent: they arrive unchanged, and their residuals do not change. values: float32, float16 or bfloat16. The
    rounding error stays in the residual. A value that overflows arrives as an infinity and also stays in the residual.
    Source: Strom 2015; Aji and Heafield 2017.
    """

    ratio: float = 0.01
    values: Value = "float32"
    align: ClassVar[int] = 1
    feedback: ClassVar[bool] = True
    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ratio("TopK", self.ratio)
        check_values("TopK", self.values)

    @property
    def name(self) -> str:
        return f"topk:ratio={self.ratio}" + (f",values={self.values}" if self.values != "float32" else "")

    def sent(self, count: int) -> int:
        """Return how many of `count` elements are sent."""
        return count_sent(self.ratio, count)

    def payload_bytes(self, count: int) -> int:
        """Return the length of the longest payload."""
        return most_bytes(count, self.sent(count), self.values)

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Write the largest elements to `payload`, as `Codec.encode` does."""
        kernels, before, after = check_encode(x, payload, self.payload_bytes(len(x)), residual)
        return kernels.largest(x, before, after, self.sent(len(x)), self.values, payload)

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode `payload` into `out`, or add its values, as `Codec.decode` does."""
        read(payload, self.values, out, add)


@dataclass(frozen=True, slots=True)
class RandomK:
    """Sends elements that the seed chooses, `ratio` of all, at least one: the same indices on all ranks.

    The array is cut into equal stretches with a random offset, and one element is drawn from each, so all have the same
    chance. unbiased: multiply by count / number sent, which makes the array the expectation (and needs no feedback). If
    any element is infinite or NaN, NaNs are sent and the residual does not change. Source: Stich et al. 2018; Wangni et
    al. 2018.
    """

    ratio: float = 0.01
    unbiased: bool = False
    align: ClassVar[int] = 1
    fixed: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio("RandomK", self.ratio)

    @property
    def name(self) -> str:
        return f"randomk:ratio={self.ratio}" + (",unbiased=true" if self.unbiased else "")

    @property
    def feedback(self) -> bool:
        return not self.unbiased

    def sent(self, count: int) -> int:
        """Return how many of `count` elements are sent."""
        return count_sent(self.ratio, count)

    def payload_bytes(self, count: int) -> int:
        """Return the length of the longest payload."""
        return most_bytes(count, self.sent(count), "float32")

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Write the elements that `seed` chooses to `payload`, as `Codec.encode` does."""
        kernels, before, after = check_encode(x, payload, self.payload_bytes(len(x)), residual)
        return kernels.random(x, before, after, self.sent(len(x)), seed, self._scale(len(x)), payload)

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode `payload` into `out`, or add its values, as `Codec.decode` does."""
        read(payload, "float32", out, add)

    def choose(self, count: int, seed: int) -> Array:
        """Return the indices that `seed` chooses, in ascending order (uint32)."""
        indices = np.empty(self.sent(count), np.uint32)
        HOST.kernels.draw(count, seed, indices)
        return indices

    def take(self, x: Array, indices: Array, values: Array, residual: tuple[Array, Array] | None = None) -> None:
        """Write the values that `encode` sends for these indices to `values` (float32), all on one device."""
        before, after = (None, None) if residual is None else residual
        device_of(x).kernels.take(x, before, after, indices, self._scale(len(x)), values)

    def _scale(self, count: int) -> float:
        return count / self.sent(count) if self.unbiased and count else 1.0


def count_sent(ratio: float, count: int) -> int:
    """Return `ratio` times `count`, rounded: at least one, unless `count` is 0."""
    return min(count, max(1, round(ratio * count)))


def read(payload: Array, value: Value, out: Array, add: bool) -> None:
    """Decode a sparse payload. Raises UsageError if it is invalid, or if its array was longer."""
    wrong = check_decode(payload, out, SPARSE_HEADER).read_sparse(payload, value, out, add)
    if wrong:
        what = {
            "too short": f"is cut off after {len(payload)} bytes",
            "outside": f"is of an array longer than {len(out)} elements",
            "other kind": "was not written by this codec with these options",
        }
        raise UsageError(f"decode: the payload {what[wrong]}")


def most_bytes(count: int, k: int, value: Value) -> int:
    """Return the length of the longest payload of k of `count` elements: header, values, and gaps of 1 or 2 bytes."""
    each = 4 if value == "float32" else 2
    return SPARSE_HEADER + k * each + min(k + count // 255, 2 * (k + count // 65535))


def check_ratio(what: str, ratio: float) -> None:
    """Raise UsageError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise UsageError(f"{what}: ratio is {ratio}, expected more than 0 and at most 1")


def check_values(what: str, values: str) -> None:
    """Raise UsageError if values cannot travel in this dtype."""
    if values not in VALUES:
        raise UsageError(f"{what}: values={values!r}, expected one of {', '.join(VALUES)}")
