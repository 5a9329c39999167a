"""Casts: Horovod's compressors, which send floating-point tensors of any framework in 16 bits.

What is sent, added and rounded then has 16 bits; sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Sends wider floating-point tensors as `wire`, others as they are. A class, not an object, as in Horovod."""

    wire: ClassVar[Any] = None
    """The framework's dtype that is sent; None for none."""
    wire_name: ClassVar[str] = ""
    """The core's name of it; "" for none."""
    name_of: ClassVar[Callable[[Any], str]]
    """Returns the core's name of a tensor's dtype."""
    to: ClassVar[Callable[[Any, str], Any]]
    """Returns a tensor in the dtype of this name."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """Return `tensor` in the dtype that is sent, and the name of its own."""
        name = cls.name_of(tensor)
        wire = narrowed(name, cls.wire_name)
        return (tensor if wire == name else cls.to(tensor, wire)), name

    @classmethod
    def decompress(cls, tensor: Any, ctx: str) -> Any:
        """Return `tensor` in its own dtype."""
        return tensor if cls.name_of(tensor) == ctx else cls.to(tensor, ctx)


def make_casts(
    module: str, name_of: Callable[[Any], str], to: Callable[[Any, str], Any], float16: Any, bfloat16: Any
) -> tuple[type[Cast], type[Cast], type[Cast]]:
    """Return a framework's NoneCompressor, FP16Compressor and BF16Compressor, to stand in `module`."""

    def made(name: str, doc: str, wire: Any = None, wire_name: str = "") -> type[Cast]:
        attributes = {"wire": wire, "wire_name": wire_name, "name_of": staticmethod(name_of), "to": staticmethod(to)}
        return type(name, (Cast,), {**attributes, "__module__": module, "__doc__": doc})

    return (
        made("NoneCompressor", "Sends tensors as they are."),
        made("FP16Compressor", "Sends wider floating-point tensors as float16.", float16, "float16"),
        made("BF16Compressor", "Sends wider floats as bfloat16: the range of float32.", bfloat16, "bfloat16"),
    )


def narrowed(dtype: str, wire: str) -> str:
    """Return in which dtype values of `dtype` travel, where floats travel as `wire` if that is narrower; "" is none."""
    return wire if wire and dtype in FLOATS and NUMPY[wire].itemsize < NUMPY[dtype].itemsize else dtype


Compressors = Compressor | type[Cast]
"""What the verbs take as `compression=`."""

Compressing = str | Codec | Scheme | Compressors
"""What optimizers take: also names such as "int8", codecs and schemes, which keep what is lost for the next step."""
