"""Casting floating tensors to 16 bits for an all-reduce. What is sent, added and rounded then has 16 bits."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import tensorflow as tf

from commlib.compress import Codec, Scheme, scheme_of
from commlib.errors import UsageError


class Compressor(Protocol):
    """What `compression=` takes: an object or class with these two."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is to be sent, and a context for `decompress`."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it was before, with the values that were received."""
        ...


class NoneCompressor:
    """Leaves tensors as they are. What casts them instead says to which dtype, in `wire`."""

    wire: ClassVar[Any] = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return what is sent for the tensor, and its dtype if that is another one."""
        if cls.wire is None or not tensor.dtype.is_floating or tensor.dtype.size <= cls.wire.size:
            return tensor, None
        return tf.cast(tensor, cls.wire), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(NoneCompressor):
    """Casts wider floating tensors to float16."""

    wire = tf.float16


class BF16Compressor(NoneCompressor):
    """Casts wider floating tensors to bfloat16: less precise than float16, but with the range of float32."""

    wire = tf.bfloat16


class Compression:
    """What may be given as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


GradientCompressing = str | Codec | Scheme | Compressor | type[Compressor]
"""What optimizers and tapes take as `compression=`."""

_CASTS = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}


def resolve(compression: GradientCompressing) -> tuple[Any, str]:
    """Return (what casts tensors in the graph, the name of the scheme by which buckets are compressed, or "").

    Raises UsageError for what is neither. A scheme must be what `scheme_of` makes of its name: by that, ranks which
    have joined know it.
    """
    if isinstance(compression, str) and compression in _CASTS:
        return _CASTS[compression], ""
    if not isinstance(compression, str | Codec | Scheme):
        if not hasattr(compression, "decompress"):
            raise UsageError(
                "compression must be a name such as 'int8', a codec or scheme of commlib.compress, one of Compression, "
                f"or have compress and decompress, got {compression!r}"
            )
        return compression, ""
    scheme = scheme_of(compression)
    if scheme is None:
        return Compression.none, ""
    known = scheme_of(scheme.name)
    if type(known) is not type(scheme) or known.name != scheme.name:
        raise UsageError(f"compression {scheme.name!r} must be known to commlib.compress.scheme_of by its name")
    return Compression.none, scheme.name
