"""Oracle of tensor parallelism: a plain Keras model on every rank, and its divided copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor import gather, parallelize, scatter
from tests.inputs.keras_pipelines import filled, in_float64

__all__ = ["in_float64"]  # a fixture

EXACT = 1e-12


def values(*shape: int, seed: int = 0) -> Any:
    """Return numbers that are equal on every rank."""
    return np.random.default_rng(seed).normal(size=shape)


def words(vocabulary: int, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, vocabulary, size=shape)


def near(got: Any, expected: Any, tolerance: float = EXACT, what: str = "") -> None:
    """Compare relative to the largest element, or 0.1: some gradients, such as K's bias, are mere rounding."""
    got, expected = (np.asarray(tf.convert_to_tensor(one)) for one in (got, expected))
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    if expected.size:
        worst = np.max(np.abs(got.astype(np.float64) - expected.astype(np.float64)))
        assert worst <= tolerance * max(0.1, np.max(np.abs(expected))), f"{what}: off by {worst}"


def near_shard(got: Any, expected: Any, variable: Any, tolerance: float = EXACT) -> None:
    """Compare a value for a variable of a divided model with the whole one."""
    shard, whole = shard_of(variable), np.asarray(tf.convert_to_tensor(expected))
    near(got, whole if shard is None else shard.own(whole), tolerance, variable.path)


def sequential(*layers: Any, shape: tuple[int | None, ...], seed: int = 0, dtype: Any = None) -> Any:
    return filled(keras.Sequential([keras.Input(shape, dtype=dtype), *layers]), seed)


def run(call: Callable[..., Any], variables: list[Any], inputs: list[Any], shapes: list[Any], compiled: bool) -> Any:
    """Return a model's outputs, and their gradients for inputs and variables with fixed weights."""
    wanted = [values(*shape, seed=9 + number) for number, shape in enumerate(shapes)]

    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            floats = [x for x in given if x.dtype.is_floating]
            tape.watch(floats)
            result = keras.tree.flatten(call(*given))
            loss = sum(tf.reduce_sum(out * tf.cast(one, out.dtype)) for out, one in zip(result, wanted, strict=True))
        gradients = tape.gradient(loss, [*floats, *variables])
        return result, gradients[: len(floats)], gradients[len(floats) :]

    given = [tf.constant(x) for x in inputs]
    return (tf.function(step, autograph=False) if compiled else step)(*given)


def alone(axis: Any, reference: Callable[[], Any]) -> Any:
    """Run a function on rank 0 only, and return its result on all ranks, with arrays for tensors."""
    result = keras.tree.map_structure(_array, reference()) if axis.rank == 0 else None
    return axis.broadcast_object(result)


def _array(value: Any) -> Any:
    return np.asarray(tf.convert_to_tensor(value)) if isinstance(value, tf.Tensor | tf.IndexedSlices) else value


def same(
    make: Callable[[], Any],
    plan: Any,
    axis: Any,
    *inputs: Any,
    compiled: bool = True,
    sequence: int | None = None,
    tolerance: float = EXACT,
    **options: Any,
) -> Any:
    """Compare outputs and all gradients of a divided model with the plain one. Return the divided model.

    sequence: the dimension along which the divided model takes and returns shards.
    """
    whole, own = make(), make()
    parallelize(own, axis, plan)

    def plain(*given: Any) -> Any:
        return whole(_inputs(given), **options)

    def divided(*given: Any) -> Any:
        if sequence is None:
            return own(_inputs(given), **options)
        result = own(_inputs([scatter(x, axis, sequence) for x in given]), **options)
        return keras.tree.map_structure(lambda out: gather(out, axis, sequence), result)

    def reference() -> Any:
        shapes = [tuple(out.shape) for out in keras.tree.flatten(plain(*inputs))]
        return shapes, run(plain, whole.trainable_variables, list(inputs), shapes, compiled)

    shapes, expected = alone(axis, reference)
    got = run(divided, own.trainable_variables, list(inputs), shapes, compiled)
    for part in (0, 1):
        for number, (one, other) in enumerate(zip(got[part], expected[part], strict=True)):
            near(one, other, tolerance, f"{('output', 'gradient of input')[part]} {number}")
    for variable, one, other in zip(own.trainable_variables, got[2], expected[2], strict=True):
        near_shard(one, other, variable, tolerance)
    return own


def _inputs(given: Any) -> Any:
    return given[0] if len(given) == 1 else list(given)
