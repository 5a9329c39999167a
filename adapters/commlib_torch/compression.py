"""Casts of tensors to 16 bits, for `compression=`: see `commlib.compress.casts`."""

from __future__ import annotations

import torch

from commlib.compress.casts import make_casts
from commlib_torch._bridge import dtype_name

NoneCompressor, FP16Compressor, BF16Compressor = make_casts(
    __name__,
    lambda tensor: dtype_name(tensor.dtype),
    lambda tensor, name: tensor.to(getattr(torch, name)),
    torch.float16,
    torch.bfloat16,
)


class Compression:
    """The compressors that come with commlib, for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
