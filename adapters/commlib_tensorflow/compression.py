"""Casts of tensors to 16 bits, for `compression=`: see `commlib.compress.casts`."""

from __future__ import annotations

import tensorflow as tf

from commlib.compress.casts import make_casts
from commlib_tensorflow._bridge import dtype_name

NoneCompressor, FP16Compressor, BF16Compressor = make_casts(
    __name__,
    lambda tensor: dtype_name(tensor.dtype),
    tf.cast,
    tf.float16,
    tf.bfloat16,
)


class Compression:
    """The built-in compressors for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
