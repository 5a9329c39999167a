"""Sign codec: send one bit per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.compress.checks import check_block, check_decode, check_encode, describe_codec
from commlib.dtypes import Array


@dataclass(frozen=True, slots=True)
class Sign:
    """Sends signs, times the mean magnitude of their block.

    EF-signSGD (Karimireddy et al. 2019); 1-bit Adam (Tang et al. 2021) has one magnitude for all elements. A zero
    decodes to the mean with the sign of the zero, unless its block is all zeros; only feedback corrects this. A block
    with an infinity or NaN decodes to NaN. Raises UsageError for another block.
    """

    block: int = 1024
    feedback: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def name(self) -> str:
        return describe_codec("sign", self)

    @property
    def align(self) -> int:
        return self.block

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + -(-count // 8)

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """Encode as `Codec.encode` does. The seed has no effect."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        kernels.signs(x, before, after, payload, self.block)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """Decode as `Codec.decode` does."""
        check_decode(payload, out, self.payload_bytes(len(out))).unsign(payload, out, self.block, add)
