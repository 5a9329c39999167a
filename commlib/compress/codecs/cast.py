"""Cast codecs: round float32 to floats of 16 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.compress.checks import check_block, check_decode, check_encode, describe_codec
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.kernels.protocol import Code

_NAMES = {"float16": "fp16", "bfloat16": "bf16"}
_FORMATS: dict[str, tuple[Code, float]] = {"e4m3": ("e4m3", 448.0), "e5m2": ("e5m2", 57344.0)}


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to float16 or bfloat16, to nearest even without a scale: 2 bytes per element.

    A value too large for float16 decodes to an infinity, as an infinity does, and NaN decodes to NaN; such an element
    does not change its residual. Raises UsageError for another dtype.
    """

    dtype: str = "float16"
    align: ClassVar[int] = 1
    feedback: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise UsageError(f"a cast needs a dtype of {', '.join(_NAMES)}, not {self.dtype!r}")

    @property
    def name(self) -> str:
        return _NAMES[self.dtype]

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Encode as `Codec.encode` does. The seed has no effect."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        kernels.narrow(x, before, after, payload, self.dtype == "bfloat16")
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode as `Codec.decode` does."""
        kernels = check_decode(payload, out, self.payload_bytes(len(out)))
        kernels.widen(payload, out, self.dtype == "bfloat16", add)


@dataclass(frozen=True, slots=True)
class Float8:
    """Rounds to 8-bit floats, scaled per block: the greatest magnitude becomes the greatest such float.

    format: "e4m3" (3 bits of mantissa, 2^-9 to 448) or "e5m2" (2 bits, 2^-16 to 57344); see Micikevicius et al. 2022. A
    block with an infinity or NaN decodes to NaN. Raises UsageError for another format or block.
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
        return describe_codec(f"fp8_{self.format}", self)

    @property
    def align(self) -> int:
        return self.block

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + count

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Encode as `Codec.encode` does. The seed has no effect."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        code, top = _FORMATS[self.format]
        kernels.quantise(x, before, after, payload, self.block, code, top, False, False, seed)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode as `Codec.decode` does."""
        kernels = check_decode(payload, out, self.payload_bytes(len(out)))
        kernels.restore(payload, out, self.block, _FORMATS[self.format][0], add)
