"""Read `compression=` of an optimizer: a cast, a scheme, or a user's object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commlib.compress import scheme_of
from commlib.compress.codec import Codec
from commlib.compress.scheme import Scheme
from commlib.compress.schemes.dgc import DGC
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


def check_no_momentum(given: Any, optimizer: str, momentum: Mapping[str, Any]) -> None:
    """Raise UsageError if both the compression and the optimizer have momentum, which would count twice.

    optimizer: the name of its class. momentum: its settings of momentum, by name; 0 or None means none.
    """
    scheme = (given if isinstance(given, CompressionChoice) else choose(given)).scheme
    if not isinstance(scheme, DGC) or not scheme.momentum:
        return
    if has := [f"{name} {value}" for name, value in momentum.items() if value is not None and value]:
        raise UsageError(
            f"compression {scheme.name!r} includes momentum, but {optimizer} has {has[0]}, too: "
            "use SGD without momentum"
        )
