"""Casting floating tensors to 16 bits for an all-reduce. What is sent, added and rounded then has 16 bits."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import tensorflow as tf

from commlib.compress import Codec, Scheme


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
    wire_name: ClassVar[str] = ""
    """The core's name of it; "" for none."""

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

    wire, wire_name = tf.float16, "float16"


class BF16Compressor(NoneCompressor):
    """Casts wider floating tensors to bfloat16: less precise than float16, but with the range of float32."""

    wire, wire_name = tf.bfloat16, "bfloat16"


class Compression:
    """What may be given as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


GradientCompressing = str | Codec | Scheme | Compressor | type[Compressor]
"""What optimizers and tapes take as `compression=`."""
