"""Gradients as tensors: their descriptions for a reducer, their form on the wire, and reduced arrays as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import commlib
from commlib.buffers.aligned_arrays import aligned_empty
from commlib.data_parallel.options import Gradient, Options
from commlib.devices.array import DeviceArray
from commlib.dtypes import numpy_dtype
from commlib.group.overlap import cores_per_rank
from commlib.named_gradients.gradients import CallSpec
from commlib_tensorflow._bridge import Array, dtype_name
from commlib_tensorflow._host_calls import is_ordered
from commlib_tensorflow._placement import DevicePlace, fits, place_of
from commlib_tensorflow.devices import tensors_over, types


class OptionalGradient(NamedTuple):
    """A reduced gradient that is None on this rank, in a graph: only the run shows whether another rank has one."""

    value: Any
    """Zeros if no rank has one."""
    exists: Any
    """A bool, or a tensor of one."""


def scale_gradient(gradient: Any, factor: float) -> Any:
    """Return a gradient, which may be sparse or None, times `factor`."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, OptionalGradient):
        return OptionalGradient(scale_gradient(gradient.value, factor), gradient.exists)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scale_gradient(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def cast_like(gradient: Any, variable: Any) -> Any:
    """Return a gradient, which may be None, in the dtype of its variable."""
    if gradient is None or variable is None or gradient.dtype == tf.as_dtype(variable.dtype):
        return gradient
    return tf.cast(gradient, variable.dtype)


def dtype_of_result(gradient: Any, like: Any) -> Any:
    """Return the dtype of a reduced gradient: this rank's, or its variable's; None if neither is known."""
    known = like if gradient is None else gradient
    return None if known is None else tf.as_dtype(known.dtype)


def encode_gradient(gradient: Any, options: Options) -> Any:
    """Return a gradient in its wire form: pre-divided, in the wire dtype."""
    if options.predivide != 1 and not gradient.dtype.is_integer:
        gradient = gradient / tf.cast(options.predivide, gradient.dtype)
    return tf.cast(gradient, options.wire_dtype(dtype_name(gradient.dtype)))


def decode_gradient(tensor: Any, dtype: Any, options: Options) -> Any:
    """Return a received gradient in dtype `dtype`, with the predivision undone."""
    tensor = tf.cast(tensor, dtype)
    if options.predivide != 1 and not tensor.dtype.is_integer:
        tensor = tensor * tf.cast(options.predivide, tensor.dtype)
    return tensor


def compress_tensors(compressor: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return dense gradients compressed by a user's compressor, others unchanged; and the compressor's contexts."""
    pairs = [
        (one, None) if one is None or isinstance(one, tf.IndexedSlices) else compressor.compress(one) for one in given
    ]
    return [message for message, _ in pairs], [context for _, context in pairs]


def decompress_tensors(compressor: Any, results: Sequence[Any], contexts: Sequence[Any]) -> list[Any]:
    """Undo `compress_tensors`."""
    return [
        one if one is None or isinstance(one, tf.IndexedSlices) else compressor.decompress(one, context)
        for one, context in zip(results, contexts, strict=True)
    ]


def is_sent_unchanged(dtype: Any, options: Options) -> bool:
    """Return whether gradients of this dtype travel as they are, and results need no conversion."""
    plain = not dtype.is_complex and dtype != tf.bfloat16 and options.predivide == 1
    return plain and options.wire_dtype(dtype_name(dtype)) == dtype_name(dtype)


def describe_gradients(
    spec: CallSpec, sent: Mapping[int, tuple[Any, Any]], like: Sequence[Any], place: DevicePlace | None
) -> tuple[Gradient, ...]:
    """Describe the gradients of a call. sent: dtype and shape of those that this rank sends; of a sparse one's rows.

    `like` are their variables, whose dtypes they have before the cast to the wire dtype.
    """
    device = "cpu" if place is None else place.name
    described = []
    for index, name in enumerate(spec.names):
        known = like[index].values if isinstance(like[index], tf.IndexedSlices) else like[index]
        dtype, shape = sent.get(index, (None, None))
        if known is None and dtype is None:
            described.append(Gradient(name, (0,), "float32", device, is_known=False))
            continue
        if known is not None:
            dtype, shape = known.dtype, known.shape if shape is None or index in spec.sparse else shape
        described.append(gradient_of(name, dtype, shape, device))
    return tuple(described)


def gradient_of(name: str, dtype: Any, shape: Any, device: str = "cpu") -> Gradient:
    """Return the reducer's description of a gradient of this dtype and shape; complex numbers become pairs."""
    kind = tf.as_dtype(dtype)
    pair = (2,) if kind.is_complex else ()
    return Gradient(name, (*(n or 0 for n in shape), *pair), dtype_name(kind.real_dtype), device)


def place_of_gradients(like: Sequence[Any]) -> DevicePlace | None:
    """Return the place of gradients, which is the place of their variables; None for the host."""
    if not types() or not is_ordered():
        return None
    known = [value.values if isinstance(value, tf.IndexedSlices) else value for value in like if value is not None]
    place = place_of(known)
    return place if place is not None and fits([value.dtype for value in known]) else None


def count_threads() -> int:
    """Return the number of TensorFlow's compute threads."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or cores_per_rank(commlib.world())


def device_tensors(results: Sequence[tuple[DeviceArray, Any]]) -> list[tf.Tensor]:
    """Return device results, each with its dtype, as tensors over them; narrow complex pairs are widened."""
    arrays = []
    for array, dtype in results:
        if dtype.is_complex and array.dtype != (real := numpy_dtype(dtype_name(dtype.real_dtype))):
            wide = array.device.wrap(array.device.empty(array.shape, real), "a gradient")
            array.device.kernels.cast(array.reshape(-1), wide.reshape(-1))
            array = wide
        arrays.append(array)
    return tensors_over(arrays, pairs=[dtype.is_complex for _, dtype in results])


def own_array(array: Array, dtype: Any, *, eager: bool) -> Array:
    """Return a result of this dtype, as an array that TensorFlow may adopt.

    TensorFlow must adopt the very object, because slots in use are tracked by it; otherwise it gets a copy.
    """
    if dtype.is_complex:
        pairs = aligned_empty(array.shape, dtype.real_dtype.as_numpy_dtype)  # it may have travelled in a narrower dtype
        pairs[...] = array
        whole: Array = pairs.view(dtype.as_numpy_dtype).reshape(array.shape[:-1])
        return whole
    return array.copy() if array.dtype.kind == "V" and eager else array
