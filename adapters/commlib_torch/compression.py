"""Sending gradients in fewer bytes than they have."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from commlib.compress import Codec, Scheme


class Compressor(Protocol):
    """What `compression=` takes. Ranks must compress equal shapes to equal shapes, which can be added up."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent for `tensor`, and whatever `decompress` needs to know."""
        ...

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor that a reduced `tensor` stands for."""
        ...


class Cast:
    """Sends floating-point tensors as `wire`, or as they are if that is None. A class, not an object, as in Horovod."""

    wire: ClassVar[torch.dtype | None] = None
    wire_name: ClassVar[str] = ""
    """The core's name of it; "" for none."""

    @classmethod
    def wire_dtype(cls, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of `dtype` is sent."""
        return cls.wire if cls.wire is not None and dtype.is_floating_point else dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor` in the dtype that is sent, and its own."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in its own dtype."""
        return tensor.to(ctx)


class NoneCompressor(Cast):
    """Sends tensors as they are."""


class FP16Compressor(Cast):
    """Sends floating-point tensors as float16. Sums are taken in float32 and rounded once."""

    wire, wire_name = torch.float16, "float16"


class BF16Compressor(Cast):
    """Sends floating-point tensors as bfloat16: the range of float32. Sums are taken in float32 and rounded once."""

    wire, wire_name = torch.bfloat16, "bfloat16"


class Compression:
    """The compressors that come with commlib, for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


Compressors = Compressor | type[Cast]
"""What the verbs take as `compression=`."""

Compressing = str | Codec | Scheme | Compressors
"""What optimizers take: also names such as "int8", codecs and schemes, which keep what is lost for the next step."""
