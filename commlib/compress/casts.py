"""Casts: Horovod's compressors, which send floating-point tensors of any framework in 16 bits.

What is sent, added and rounded then has 16 bits; sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from commlib.compress.codec import Codec
from commlib.compress.scheme import Scheme
from commlib.dtypes import FLOATS, NUMPY


class Compressor(Protocol):
    """Compress a tensor, for `compression=`. Ranks compress equal shapes to equal shapes that can be added up."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return what is sent for `tensor`, and whatever `decompress` needs to know."""
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor that a reduced `tensor` stands for."""
        ...


class Cast:
    """Sends wider floating-point tensors as `wire_name`, others as they are. A class, not an object, as in Horovod.

    An adapter's subclasses say what a tensor's dtype is called, and how one is cast.
    """

    wire_name: ClassVar[str] = ""
    """The core's name of a dtype; "" for none."""

    @staticmethod
    def name_of(tensor: Any) -> str:
        """Return the core's name of a tensor's dtype."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Any, name: str) -> Any:
        """Return a tensor in the dtype of this name."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """Return `tensor` in the dtype that is sent, and the name of its own."""
        name = cls.name_of(tensor)
        wire = narrowed(name, cls.wire_name)
        return (tensor if wire == name else cls.cast(tensor, wire)), name

    @classmethod
    def decompress(cls, tensor: Any, ctx: str) -> Any:
        """Return `tensor` in its own dtype."""
        return tensor if cls.name_of(tensor) == ctx else cls.cast(tensor, ctx)


def narrowed(dtype: str, wire: str) -> str:
    """Return in which dtype values of `dtype` travel, where floats travel as `wire` if that is narrower; "" is none."""
    return wire if wire and dtype in FLOATS and NUMPY[wire].itemsize < NUMPY[dtype].itemsize else dtype


Compressors = Compressor | type[Cast]
"""What the verbs take as `compression=`."""

Compressing = str | Codec | Scheme | Compressors
"""What optimizers take: also names such as "int8", codecs and schemes, which keep what is lost for the next step."""
