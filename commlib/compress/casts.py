"""Casts: Horovod's compressors, which send floating-point tensors of any framework in 16 bits.

Values are sent, added and rounded in 16 bits; sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from commlib.compress.codec import Codec
from commlib.compress.scheme import Scheme
from commlib.dtypes import FLOATS, NUMPY
from commlib.errors import UsageError


class Compressor(Protocol):
    """Interface of tensor compressors, for `compression=`. Ranks compress equal shapes to equal, summable shapes."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the compressed `tensor`, and the context for `decompress`."""
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the tensor that a reduced `tensor` decodes to."""
        ...


class TensorCast:
    """Sends wider floating-point tensors as `wire`, others unchanged. A class, not an object, as in Horovod."""

    wire: ClassVar[Any] = None
    """The framework's dtype on the wire; None for no cast."""
    wire_name: ClassVar[str] = ""
    """The core's name of that dtype; "" for no cast."""
    name_of: ClassVar[Callable[[Any], str]]
    """Returns the core's name of a tensor's dtype."""
    to: ClassVar[Callable[[Any, str], Any]]
    """Returns a tensor in the dtype of this name."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str]:
        """Return `tensor` in the wire dtype, and the name of its original dtype."""
        name = cls.name_of(tensor)
        wire = narrow_dtype(name, cls.wire_name)
        return (tensor if wire == name else cls.to(tensor, wire)), name

    @classmethod
    def decompress(cls, tensor: Any, ctx: str) -> Any:
        """Return `tensor` in its original dtype."""
        return tensor if cls.name_of(tensor) == ctx else cls.to(tensor, ctx)


def make_casts(
    module: str, name_of: Callable[[Any], str], to: Callable[[Any, str], Any], float16: Any, bfloat16: Any
) -> tuple[type[TensorCast], type[TensorCast], type[TensorCast]]:
    """Return a framework's NoneCompressor, FP16Compressor and BF16Compressor, defined in `module`."""

    def make_cast(name: str, doc: str, wire: Any = None, wire_name: str = "") -> type[TensorCast]:
        attributes = {"wire": wire, "wire_name": wire_name, "name_of": staticmethod(name_of), "to": staticmethod(to)}
        return type(name, (TensorCast,), {**attributes, "__module__": module, "__doc__": doc})

    return (
        make_cast("NoneCompressor", "Sends tensors unchanged."),
        make_cast("FP16Compressor", "Sends wider floating-point tensors as float16.", float16, "float16"),
        make_cast("BF16Compressor", "Sends wider floats as bfloat16: the range of float32.", bfloat16, "bfloat16"),
    )


def check_compressor(given: Any, what: str = "compression") -> None:
    """Raise UsageError unless `given` compresses single tensors. what: the argument, for errors."""
    if not (hasattr(given, "compress") and hasattr(given, "decompress")):
        hint = f"Compression.{given}" if given in ("none", "fp16", "bf16") else "Compression.none, .fp16 or .bf16"
        raise UsageError(f"{what} must be an object with compress and decompress, got {given!r}: pass {hint}")


def narrow_dtype(dtype: str, wire: str) -> str:
    """Return the wire dtype of `dtype`: `wire` if `dtype` is a wider float, else `dtype`. "" is no cast."""
    return wire if wire and dtype in FLOATS and NUMPY[wire].itemsize < NUMPY[dtype].itemsize else dtype


Compressors = Compressor | type[TensorCast]
"""Values of `compression=` for the verbs."""

Compressing = str | Codec | Scheme | Compressors
"""Values of `compression=` for optimizers: also names such as "int8", codecs and schemes, which use error feedback."""
