"""Sending tensors in 16 bits: see `commlib.compress.casts`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from commlib.compress.casts import Cast
from commlib_torch._bridge import dtype_name


class NoneCompressor(Cast):
    """Sends tensors as they are."""

    wire: ClassVar[Any] = None

    @staticmethod
    def name_of(tensor: Any) -> str:
        """Return the core's name of a tensor's dtype."""
        return dtype_name(tensor.dtype)

    @staticmethod
    def cast(tensor: Any, name: str) -> Any:
        """Return a tensor in the dtype of this name."""
        return tensor.to(getattr(torch, name))


class FP16Compressor(NoneCompressor):
    """Sends wider floating-point tensors as float16."""

    wire, wire_name = torch.float16, "float16"


class BF16Compressor(NoneCompressor):
    """Sends wider floating-point tensors as bfloat16: less precise than float16, but with the range of float32."""

    wire, wire_name = torch.bfloat16, "bfloat16"


class Compression:
    """The compressors that come with commlib, for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
