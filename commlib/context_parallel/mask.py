"""Mask: valid shapes of a mask of this rank's queries over all keys. [pure]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.errors import UsageError

_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as (batch or 1, heads or 1, this rank's queries or 1, keys of the full sequence), and its dtype.

    bool: True keeps a pair. Floats are added to scores. batch: None if it is not known yet.
    """

    dtype: str
    batch: int | None
    heads: int
    queries: int
    keys: int

    @classmethod
    def of(cls, what: str, dtype: str, given: Sequence[Any], batch: int | None, heads: int, tokens: int | None) -> Mask:
        """Return the mask of a tensor, which may lack leading dimensions. Raises UsageError. None: any number."""
        expected = f"expected bool or floats, (batch, heads, this rank's {tokens} tokens, tokens of the full sequence)"
        if dtype != "bool" and dtype not in _FLOATS:
            raise UsageError(f"{what}: mask has dtype {dtype}, {expected}")
        if not 2 <= len(given) <= 4:
            raise UsageError(f"{what}: mask has shape {list(given)}, {expected}, or the last two or three of these")
        shape = [1] * (4 - len(given)) + list(given)
        for size, wanted in zip(shape[:3], (batch, heads, tokens), strict=True):
            if size not in (1, wanted) and None not in (size, wanted):
                raise UsageError(
                    f"{what}: mask has shape {list(given)}, {expected}, where each of the first three may be 1; here "
                    f"they are {[batch, heads, tokens]}"
                )
        return cls(dtype, *shape)

    def check_keys(self, what: str, length: int) -> None:
        """Raise UsageError unless the mask has all keys of a sequence of this length."""
        if self.keys != length:
            raise UsageError(
                f"{what}: mask has {self.keys} keys, expected {length}, all keys of the full sequence in its order. "
                "A mask has this rank's queries, and all keys; key_mask is a mask of this rank's keys only"
            )


def check_key_mask(what: str, dtype: str, given: Sequence[Any], batch: int | None, tokens: int | None) -> None:
    """Raise UsageError unless a mask of this rank's keys is bool, (batch, tokens). None: any number."""
    pairs = zip(given, (batch, tokens), strict=False)
    if dtype != "bool" or len(given) != 2 or any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise UsageError(
            f"{what}: key_mask is {dtype}{list(given)}, expected bool of shape (batch, this rank's tokens), "
            f"{[batch, tokens]}: True keeps a key"
        )
