"""Casts to 16 and 8 bits as codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.buffers.views import address_of
from commlib.compress.arguments import check_block, check_decode, check_encode, described
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.host import convert, quantise

_NAMES = {"float16": "fp16", "bfloat16": "bf16"}
_FORMATS = {"e4m3": (quantise.E4M3, 448.0), "e5m2": (quantise.E5M2, 57344.0)}


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounding to float16 or bfloat16: 2 bytes an element, to nearest even, without a scale.

    What is too large for float16 decodes to an infinity, as an infinity does, and NaN to NaN; such an element leaves
    its residual as it was. Raises UsageError for another dtype.
    """

    dtype: str = "float16"
    align: ClassVar[int] = 1
    feedback: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise UsageError(f"a cast goes to one of {', '.join(_NAMES)}, not {self.dtype!r}")

    @property
    def name(self) -> str:
        return _NAMES[self.dtype]

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """See `Codec.encode`. Nothing depends on the seed."""
        needed = self.payload_bytes(len(x))
        before, after = check_encode(x, payload, needed, residual)
        bfloat = self.dtype == "bfloat16"
        if residual is None:
            convert.narrow(address_of(x), address_of(payload), len(x), bfloat)
        else:
            convert.narrow_sum(address_of(x), before, after, address_of(payload), len(x), bfloat)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        check_decode(payload, out, self.payload_bytes(len(out)))
        convert.widen(address_of(payload), address_of(out), len(out), self.dtype == "bfloat16", add)


@dataclass(frozen=True, slots=True)
class Float8:
    """Rounding to floats of 8 bits, scaled by block so that the greatest magnitude becomes the greatest such float.

    format: "e4m3" (3 bits of mantissa, 2^-9 to 448) or "e5m2" (2 bits, 2^-16 to 57344); see Micikevicius et al. 2022.
    A block with an infinity or NaN decodes to NaN. Raises UsageError for another format or block.
    """

    format: str = "e4m3"
    block: int = 1024
    feedback: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise UsageError(f"the format of an 8-bit float is one of {', '.join(_FORMATS)}, not {self.format!r}")
        check_block(self.block)

    @property
    def name(self) -> str:
        return described(f"fp8_{self.format}", self)

    @property
    def align(self) -> int:
        return self.block

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """See `Codec.encode`. Nothing depends on the seed."""
        needed = self.payload_bytes(len(x))
        before, after = check_encode(x, payload, needed, residual)
        kind, top = _FORMATS[self.format]
        to = address_of(payload)
        quantise.encode(address_of(x), before, after, to, len(x), self.block, kind, top, False, False, seed)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        check_decode(payload, out, self.payload_bytes(len(out)))
        kind, _ = _FORMATS[self.format]
        quantise.decode(address_of(payload), address_of(out), len(out), self.block, kind, add)
