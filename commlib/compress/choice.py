"""Read `compression=` of an optimizer: a cast, a scheme, or a user's object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlib.compress import scheme_of
from commlib.compress.codec import Codec
from commlib.compress.scheme import Scheme
from commlib.errors import UsageError

CASTS = {"none": "", "fp16": "float16", "bf16": "bfloat16"}
"""The dtypes for casts of gradients, by the names of Horovod's compressors."""


@dataclass(frozen=True, slots=True)
class CompressionChoice:
    """The compression of gradients. At most one of the three fields is set."""

    wire: str = ""
    """The dtype for casts of floating-point gradients, such as "float16"; "" for no cast."""
    scheme: Scheme | None = None
    """The compression of buckets, beyond a cast."""
    compressor: Any = None
    """An object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context)`."""


def choose(given: Any) -> CompressionChoice:
    """Return the choice for `given`: a name, a codec or scheme, an adapter's cast, or a user's compressor.

    A cast has the attribute `wire_name`. Raises UsageError for other values.
    """
    if isinstance(given, str) and given in CASTS:
        return CompressionChoice(wire=CASTS[given])
    if isinstance(given, str | Codec | Scheme):
        return CompressionChoice(scheme=scheme_of(given))
    wire = getattr(given, "wire_name", None)
    if isinstance(wire, str):
        return CompressionChoice(wire=wire)
    if hasattr(given, "decompress"):
        return CompressionChoice(compressor=given)
    raise UsageError(
        "compression must be a name such as 'int8', a codec or scheme of commlib.compress, a member of Compression, "
        f"or an object with compress and decompress, got {given!r}"
    )
