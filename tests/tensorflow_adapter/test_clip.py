"""Clipping by the norm of all gradients matches TensorFlow, with the same bits on all ranks."""

from __future__ import annotations

import math
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from commlib_tensorflow.optimizer import DistributedOptimizer
from tests.tensorflow_adapter.oracle import MODES, assert_close, in_mode

# TensorFlow adds squares in float32 (64 numbers here: at most 64 x 2^-24 relative), commlib in float64.
FLOAT32 = 64 * 2.0**-24


def tensors(dtype: Any) -> list[Any]:
    generator = np.random.default_rng(0)
    return [tf.cast(tf.constant(generator.standard_normal(shape)), dtype) for shape in [(3, 5), (), (0, 2), (40,)]]


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [tf.float64, tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("mode", MODES)
def test_clipping_matches_tensorflow(comm: Any, mode: str, dtype: Any, clip_norm: float) -> None:
    given = [*tensors(dtype), None]
    wide = [None if g is None else tf.cast(g, tf.float64) for g in given]
    clipped, norm = in_mode(mode, lambda: hvd.clip_by_global_norm(given, clip_norm))()
    expected, expected_norm = tf.clip_by_global_norm(wide, clip_norm)
    assert norm.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-14 if dtype == tf.float64 else 2.0**-24)
    for one, other in zip(clipped, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == dtype
            # The factor and the product are rounded to the dtype.
            tolerance = 2 * ml_dtypes.finfo(dtype.as_numpy_dtype).eps
            smallest = float(ml_dtypes.finfo(dtype.as_numpy_dtype).smallest_subnormal)
            np.testing.assert_allclose(tf.cast(one, tf.float64), other, rtol=float(tolerance), atol=smallest)
    everyone = comm.all_gather_object([np.asarray(t.numpy()).tobytes() for t in (norm, *clipped[:-1])])
    assert all(theirs == everyone[0] for theirs in everyone)


def test_gradients_below_the_limit_do_not_change(comm: Any) -> None:
    given = tensors(tf.float32)
    for one, other in zip(hvd.clip_by_global_norm(given, 1e3)[0], given, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    (zeros,), norm = hvd.clip_by_global_norm([tf.zeros(3)], 0.0)
    assert float(norm) == 0
    assert_close(zeros, tf.zeros(3))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(comm: Any, value: float) -> None:
    given = [tf.ones(3), tf.constant([2.0, value])]
    clipped, norm = hvd.clip_by_global_norm(given, 1.0)
    expected, expected_norm = tf.clip_by_global_norm(given, 1.0)
    np.testing.assert_array_equal(norm, expected_norm)
    for one, other in zip(clipped, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sparse_gradients_stay_sparse(comm: Any) -> None:
    slices = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 2]), tf.constant([3, 1]))
    (clipped,), norm = hvd.clip_by_global_norm([slices], 1.0)
    assert float(norm) == 5
    np.testing.assert_allclose(clipped.values, [[0.6], [0.8]], rtol=2.0**-23)
    assert clipped.indices is slices.indices


def test_bad_arguments(comm: Any) -> None:
    for clip_norm in (-1.0, math.nan):
        with pytest.raises(UsageError, match="non-negative"):
            hvd.clip_by_global_norm([tf.ones(2)], clip_norm)
    with pytest.raises(UsageError, match="expected floating-point tensors, got int32"):
        hvd.clip_by_global_norm([tf.constant(1)], 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_keras_clips_reduced_gradients(comm: Any, mode: str) -> None:
    """The norm is that of the mean, as in one process with all the data."""
    total = np.mean([rank + np.arange(6.0) for rank in range(comm.size)], axis=0).astype(np.float32)
    variable, alone = keras.Variable(np.zeros(6, np.float32)), keras.Variable(np.zeros(6, np.float32))
    ours = DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=0.5), name=f"clipping {mode}")
    theirs = keras.optimizers.SGD(1.0, global_clipnorm=0.5)
    ours.build([variable])
    theirs.build([alone])
    step = in_mode(mode, lambda g: ours.apply([g], [variable]))
    for _ in range(3):
        step(tf.constant(comm.rank + np.arange(6.0), tf.float32))
        theirs.apply([tf.constant(total)], [alone])
    np.testing.assert_allclose(variable, alone, rtol=FLOAT32, atol=0)


@pytest.mark.ranks(min=2)
def test_variables_of_one_rank_are_excluded_from_the_norm(comm: Any) -> None:
    """Their gradients differ: in the norm, they would scale shared gradients differently, and ranks would diverge."""
    shared, own = keras.Variable(np.zeros(2, np.float32)), keras.Variable(np.zeros(2, np.float32))
    optimizer: Any = DistributedOptimizer(
        keras.optimizers.SGD(1.0, global_clipnorm=1.0), name="own variables", scale_local_gradients=False
    )
    optimizer.register_local_var(own)
    optimizer.build([shared, own])
    optimizer.apply([tf.constant([3.0, 4.0]), tf.constant([0.0, 10.0 * comm.rank])], [shared, own])
    np.testing.assert_allclose(shared, [-0.6, -0.8], rtol=2.0**-22)
    np.testing.assert_allclose(own, [0.0, -1.0 if comm.rank else 0.0], rtol=2.0**-22)
