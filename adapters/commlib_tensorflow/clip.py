"""Gradient clipping by the global norm for TensorFlow: see `commlib.optim.clipping`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.arguments import list_of
from commlib.dtypes import FLOATS, name_of
from commlib.errors import UsageError
from commlib.optim.clipping import check_limit, clip_factor, norm_of_arrays, sum_over_axes
from commlib_tensorflow._bridge import Array, as_tensor
from commlib_tensorflow._host_calls import Spec, call, no_autograph
from commlib_tensorflow._placement import place_of
from commlib_tensorflow._shards import shard_of, take_counted


@no_autograph
def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: float, variables: Sequence[Any] = ()
) -> tuple[list[Any], Any]:
    """Scale the tensors of `t_list` so that their joint 2-norm is at most `clip_norm`; return (tensors, norm before).

    For reduced gradients. They may have different floating dtypes, be tf.IndexedSlices, or be None, which stays None.
    The norm is a scalar of float32, or of float64 if one of them is float64. The same gradients give the same bits on
    every CPU, so ranks' weights stay equal even if their CPUs differ, which tf.clip_by_global_norm does not promise.
    Otherwise it behaves like tf.clip_by_global_norm: an infinite or NaN norm makes everything NaN. Tensors on a GPU are
    squared on the GPU, with the same bits on GPUs of one kind. It works eagerly and in a traced function, without
    waiting for other ranks.

    Exception: if some of `variables` (the variables of these gradients) are sharded, including experts, the norm is
    that of the unsharded gradients, and their ranks call this together. Gradients returned by a
    `DistributedGradientTape` carry this information; pass `variables` for others, including values computed from such
    gradients.

    Args:
        t_list: Reduced gradients: tensors of any floating dtypes, tf.IndexedSlices, or None.
        clip_norm: The norm to scale down to, 0 or more.
        variables: The variables of these gradients, if some are sharded and the gradients do not come straight from a
            tape.

    Raises:
        UsageError: For a `clip_norm` that is negative or NaN, or for anything that is not a floating-point tensor.

    Examples:
        >>> gradients, norm = ct.clip_by_global_norm([tf.constant([3.0, 4.0])], 1.0)
        >>> float(norm)
        5.0
    """
    limit = check_limit("clip_by_global_norm", "clip_norm", clip_norm)
    t_list = list_of("clip_by_global_norm", "a list of gradients", t_list)
    values = [_values(gradient) for gradient in t_list]
    given = [value for value in values if value is not None]
    if variables and len(variables) != len(t_list):
        raise UsageError(f"clip_by_global_norm: {len(t_list)} gradients, but {len(variables)} variables")
    of = variables or t_list
    shards = [shard_of(one) for one, value in zip(of, values, strict=True) if value is not None]
    given = [take_counted(value, shard) for value, shard in zip(given, shards, strict=True)]
    comms = [None if shard is None else shard.axis.comm for shard in shards] or None

    def measured(norm: float) -> list[Array]:
        return [np.array(norm), np.array(clip_factor(norm, limit, infinite_is_nan=True))]

    def measure(*arrays: Array) -> list[Array]:
        return measured(norm_of_arrays(arrays, comms))

    def of_squares(squares: Array) -> list[Array]:
        return measured(math.sqrt(sum_over_axes(zip(comms or repeat(None), squares.tolist(), strict=False))))

    scalar = Spec(tf.float64, ())
    if place_of(given) is None:
        norm, factor = call(measure, given, [scalar, scalar])
    else:
        norm, factor = call(of_squares, [tf.stack(list(map(_square, given)))], [scalar, scalar])
    clipped = [
        None if v is None else with_values(g, v * tf.cast(factor, v.dtype)) for g, v in zip(t_list, values, strict=True)
    ]
    double = any(value.dtype == tf.float64 for value in given)
    return clipped, tf.cast(norm, tf.float64 if double else tf.float32)


def _square(values: Any) -> Any:
    """Return the sum of the squares of values in float64, without memory for the squares."""
    wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    return 2.0 * tf.cast(tf.nn.l2_loss(wide), tf.float64)


def _values(gradient: Any) -> Any:
    """Return the tensor that holds a gradient's values; None stays. Raises UsageError for other dtypes than floats."""
    if gradient is None:
        return None
    values = values_of(gradient)
    if name_of(values.dtype.as_numpy_dtype) not in FLOATS:
        raise UsageError(f"clip_by_global_norm: expected floating-point tensors, got {values.dtype.name}")
    return values


def values_of(gradient: Any) -> Any:
    """Return the tensor that holds a gradient's values: the rows of tf.IndexedSlices."""
    return as_tensor(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)


def with_values(gradient: Any, values: Any) -> Any:
    """Return a gradient with other values, as tf.IndexedSlices if it is one."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
