"""Sign codec: send one bit for each element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commlib.compress.checks import check_block, check_decode, check_encode, described
from commlib.dtypes import Array


@dataclass(frozen=True, slots=True)
class Sign:
    """Signs, times the mean magnitude of their block.

    EF-signSGD (Karimireddy et al. 2019); 1-bit Adam (Tang et al. 2021) has one magnitude for all. A zero decodes
    to the mean with the zero's own sign, unless its whole block is zero: only feedback makes that good. A block with an
    infinity or NaN decodes to NaN. Raises UsageError for another block.
    """

    block: int = 1024
    feedback: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def name(self) -> str:
        return described("sign", self)

    @property
    def align(self) -> int:
        return self.block

    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // self.block) + -(-count // 8)

    def encode(self, x: Array, payload: Array, *, seed: int = 0, residual: tuple[Array, Array] | None = None) -> int:
        """See `Codec.encode`. Nothing depends on the seed."""
        needed = self.payload_bytes(len(x))
        kernels, before, after = check_encode(x, payload, needed, residual)
        kernels.signs(x, before, after, payload, self.block)
        return needed

    def decode(self, payload: Array, out: Array, *, add: bool = False) -> None:
        """See `Codec.decode`."""
        check_decode(payload, out, self.payload_bytes(len(out))).unsign(payload, out, self.block, add)
