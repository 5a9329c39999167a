"""Casting floating tensors to 16 bits for an all-reduce. What is sent, added and rounded then has 16 bits."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


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
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


def _wider_than_16_bits(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating and tensor.dtype.size > 2)


class FP16Compressor:
    """Casts wider floating tensors to float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and its dtype if that was another one."""
        return (tf.cast(tensor, tf.float16), tensor.dtype) if _wider_than_16_bits(tensor) else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor:
    """Casts wider floating tensors to bfloat16: less precise than float16, but with the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as bfloat16, and its dtype if that was another one."""
        return (tf.cast(tensor, tf.bfloat16), tensor.dtype) if _wider_than_16_bits(tensor) else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """What may be given as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
