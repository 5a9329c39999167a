"""Read what `compression=` of an optimizer may be: a cast, a scheme, or an object of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlib.compress import scheme_of
from commlib.compress.codec import Codec
from commlib.compress.scheme import Scheme
from commlib.errors import UsageError

CASTS = {"none": "", "fp16": "float16", "bf16": "bfloat16"}
"""The dtypes in which gradients may travel, by the names of Horovod's compressors."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Say how gradients travel. At most one of the three is set."""

    wire: str = ""
    """The dtype that floating-point gradients are cast to, such as "float16"; "" is their own."""
    scheme: Scheme | None = None
    """How buckets are compressed, beyond a cast."""
    compressor: Any = None
    """An object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`."""


def choose(given: Any) -> Choice:
    """Return what `given` means: a name, a codec or scheme, an adapter's cast, or a compressor of the user's.

    A cast has the attribute `wire_name`. Raises UsageError for anything else.
    """
    if isinstance(given, str) and given in CASTS:
        return Choice(wire=CASTS[given])
    if isinstance(given, str | Codec | Scheme):
        return Choice(scheme=scheme_of(given))
    wire = getattr(given, "wire_name", None)
    if isinstance(wire, str):
        return Choice(wire=wire)
    if hasattr(given, "decompress"):
        return Choice(compressor=given)
    raise UsageError(
        "compression must be a name such as 'int8', a codec or scheme of commlib.compress, one of Compression, "
        f"or have compress and decompress, got {given!r}"
    )
