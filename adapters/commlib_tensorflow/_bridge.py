"""Conversion between TensorFlow tensors and numpy arrays: the core uses numpy only.

Reading a tensor on the CPU is free. Making a tensor from an array is free if the memory starts on a cache line
(`commlib.horovod.empty` allocates such memory): TensorFlow then adopts the memory, and a variable that is assigned the
tensor may adopt it in turn. So an array that became a tensor belongs to TensorFlow, and nobody may write to it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.dtypes import DTYPES
from commlib.errors import UsageError

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes. TensorFlow adopts memory that starts at a multiple of it; over DLPack it aborts the process otherwise."""

_TO_DENSE = {
    tf.IndexedSlices: ("an IndexedSlices", "tf.convert_to_tensor(x)"),
    tf.SparseTensor: ("a SparseTensor", "tf.sparse.to_dense(x)"),
    tf.RaggedTensor: ("a RaggedTensor", "x.to_tensor()"),
}


def dtype_name(dtype: Any) -> str:
    """Return the core's name of a TensorFlow dtype, such as "bfloat16". Raises UsageError for unsupported ones."""
    name = str(tf.as_dtype(dtype).base_dtype.name)
    if name not in DTYPES:
        raise UsageError(f"tensors of dtype {name} are not supported; supported are {', '.join(DTYPES)}")
    return name


def as_tensor(value: Any, call: str = "") -> tf.Tensor:
    """Convert a user's value, such as a variable, an array or a number, to a tensor of a dtype that the core supports.

    Raises UsageError if the value is not a tensor. call: the call that it was passed to, for errors.
    """
    if call:
        try:
            return as_tensor(value)
        except UsageError as error:
            raise UsageError(f"{call}: {error}") from error.__cause__
    if isinstance(value, tuple(_TO_DENSE)):
        name, convert = next(how for kind, how in _TO_DENSE.items() if isinstance(value, kind))
        raise UsageError(f"expected a dense tensor, got {name}: convert it with {convert}")
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected a tensor, got {type(value).__name__}: {error}") from error
    dtype_name(tensor.dtype)
    return tensor


def to_array(tensor: Any) -> Array:
    """Return the values of an eager tensor as a contiguous, read-only array.

    On the CPU it shares the tensor's memory, which the array keeps alive; from a GPU it is a copy.
    """
    read = getattr(tensor, "_numpy", None)  # numpy() copies
    return np.asarray(tensor.numpy() if read is None else read(), order="C")


def to_tensor(array: Array) -> tf.Tensor:
    """Return an eager tensor with the values of an array that nobody else writes to, now or later.

    It shares the array's memory if that is aligned; otherwise it is a copy.
    """
    flags = array.flags
    if not array.size or array.ctypes.data % ALIGNMENT or not (flags.c_contiguous and flags.writeable):
        return tf.convert_to_tensor(array)
    if array.dtype.kind == "V":  # bfloat16: DLPack has it, numpy's DLPack export does not
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
