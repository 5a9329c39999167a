"""TensorFlow tensors and numpy arrays: the core speaks numpy only.

Reading is free on the CPU. Writing is free the other way round, for memory that starts on a cache line (which
`commlib.horovod.empty` makes): TensorFlow then adopts it, and a variable that is assigned the tensor may adopt it in
turn. So an array that became a tensor belongs to TensorFlow: nobody may write to it again.
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
"""Bytes. TensorFlow adopts memory that starts at a multiple of it, and aborts the process over DLPack otherwise."""


def dtype_name(dtype: Any) -> str:
    """Return the name under which the core knows a dtype of TensorFlow, such as "bfloat16". Raises UsageError."""
    name = str(tf.as_dtype(dtype).base_dtype.name)
    if name not in DTYPES:
        raise UsageError(f"tensors of dtype {name} are not supported; supported are {', '.join(DTYPES)}")
    return name


def as_tensor(value: Any) -> tf.Tensor:
    """Return what the user gave, such as a variable, an array or a number, as a tensor of a dtype that the core takes.

    Raises UsageError for what is no tensor.
    """
    if isinstance(value, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        raise UsageError(f"expected a dense tensor, got a {type(value).__name__}: convert it with tf.convert_to_tensor")
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected a tensor, got {type(value).__name__}: {error}") from error
    dtype_name(tensor.dtype)
    return tensor


def to_array(tensor: Any) -> Array:
    """Return an array with the values of an eager tensor, contiguous. It must only be read.

    On the CPU it is the tensor's memory, which the array keeps alive; from a GPU it is a copy.
    """
    read = getattr(tensor, "_numpy", None)  # numpy() copies
    return np.asarray(tensor.numpy() if read is None else read(), order="C")


def to_tensor(array: Array) -> tf.Tensor:
    """Return an eager tensor with the values of an array that nobody else writes to, now or later.

    It has the array's memory if that is aligned, else a copy.
    """
    if not array.size or array.ctypes.data % ALIGNMENT or not _is_plain(array):
        return tf.convert_to_tensor(array)
    if array.dtype.kind == "V":  # bfloat16, which DLPack knows but numpy's does not
        return tf.bitcast(tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__()), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _is_plain(array: Array) -> bool:
    return bool(array.flags.c_contiguous and array.flags.writeable)
