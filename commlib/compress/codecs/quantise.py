"""Quantizing codecs: round float32 to integers of 8 or 4 bits, scaled per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.compress.checks import check_block, check_decode, check_encode, describe_codec
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.protocol import Code

_CODES: dict[int, tuple[Code, float]] = {8: ("int8", 127.0), 4: ("int4", 7.0)}
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rounds to multiples of a block's greatest magnitude over 127 (8 bits) or 7 (4 bits); Dettmers 2015, ZeRO++ 2023.

    rounding: "nearest" or "stochastic"; with the latter the decoded value has the true value as its expectation. A
    block with an infinity or NaN decodes to NaN. Raises UsageError for other bits, blocks or roundings.
    """

    bits: int = 8
    block: int = 256
    rounding: str = "nearest"
    feedback: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in _CODES:
            raise UsageError(f"blocks are quantized to 8 or 4 bits, not {self.bits}")
        if self.rounding not in _ROUNDINGS:
            raise UsageError(f"rounding is one of {', '.join(_ROUNDINGS)}, not {self.rounding!r}")
        check_block(self.block)

    @property
    def name(self) -> str:
        return describe_codec(f"int{self.bits}", self)

    @property
    def align(self) -> int:
        return self.block

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + -(-count * self.bits // 8)

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Encode as `Codec.encode` does."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        code, top = _CODES[self.bits]
        at_random = self.rounding == "stochastic"
        kernels.quantise(x, before, after, payload, self.block, code, top, False, at_random, seed)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode as `Codec.decode` does."""
        kernels = check_decode(payload, out, self.payload_bytes(len(out)))
        kernels.restore(payload, out, self.block, _CODES[self.bits][0], add)


@dataclass(frozen=True, slots=True)
class QSGD:
    """Rounds to multiples of the block's Euclidean norm over `levels`, at random and unbiased; Alistarh et al. 2017.

    bucket: the paper's term for the elements that share a norm. Codes take 8 bits each, for any number of levels (1 to
    127). A block with an infinity or NaN decodes to NaN. Raises UsageError for other levels or buckets.
    """

    levels: int = 127
    bucket: int = 512
    feedback: ClassVar[bool] = False
    fixed: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise UsageError(f"levels must be from 1 to 127, to fit a code in 8 bits, not {self.levels}")
        check_block(self.bucket, "bucket")

    @property
    def name(self) -> str:
        return describe_codec("qsgd", self)

    @property
    def align(self) -> int:
        return self.bucket

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.bucket) + count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Encode as `Codec.encode` does."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        top = float(self.levels)
        kernels.quantise(x, before, after, payload, self.bucket, "int8", top, True, True, seed)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode as `Codec.decode` does."""
        kernels = check_decode(payload, out, self.payload_bytes(len(out)))
        kernels.restore(payload, out, self.bucket, "int8", add)
