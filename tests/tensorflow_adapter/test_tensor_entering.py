"""Inputs shared by several Keras layers are moved once, and every tape records the move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import gather, parallelize, scatter
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, sequential, values

__all__ = ["in_float64"]  # a fixture


class Gated(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Two layers with one input, and one that sums. again: the first one is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (keras.layers.Dense(7, "sigmoid", name=name) for name in ("gate", "up"))
        self.down, self.again = keras.layers.Dense(4, name="down"), False

    def call(self, x: Any) -> Any:
        gate = tf.recompute_grad(self.gate) if self.again else self.gate
        return self.down(gate(x) * self.up(x))


GATED: Any = {"*gate": Column(), "*up": Column(), "*down": Row()}


def reductions(comm: Any, run: Callable[[], Any]) -> list[int]:
    """Return the bytes of each all-reduce during a function."""
    calls: list[int] = []
    reduce = type(comm).all_reduce

    def counting(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(np.asarray(x).nbytes)
        return reduce(self, x, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(comm), "all_reduce", counting)
        run()
    return calls


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_with_one_input_share_one_reduction(comm: Any, in_float64: None, compiled: bool) -> None:
    """The gradients of the input of both halves are reduced together; separately they would be twice the bytes."""
    model = sequential(Gated(), Gated(), shape=(5, 4))
    parallelize(model, comm, GATED)
    x = tf.constant(values(2, 5, 4))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, x)

    run = tf.function(step, autograph=False) if compiled else step
    run(x)
    assert (
        reductions(comm, lambda: run(x)) == [2 * 5 * 4 * 8] * 4
    )  # of two blocks: the output, and the input's gradient


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["again", "twice", "two tapes", "sequence"])
def test_shared_inputs_have_all_their_gradients(comm: Any, in_float64: None, way: str, compiled: bool) -> None:
    """A layer does not reuse a move that its tape would not record."""

    whole, own = (sequential(Gated(), shape=(5, 4)) for _ in range(2))
    along: Any = {"sequence": 1 if way == "sequence" else None}
    plan = {"*gate": Column(**along), "*up": Column(**along), "*down": Row(**along)}
    parallelize(own, comm, plan, divided_output=True)
    own.layers[0].again = way == "again"  # which rules cannot follow
    x, y = values(2, 2, 5, 4)

    def step(model: Any) -> Any:
        given = tf.constant(x)
        with tf.GradientTape() as first:
            first.watch(given)
            if way == "sequence" and model is own:
                out = gather(own(scatter(given, comm, 1)), comm, 1)
            else:
                out = model(given)
            loss = tf.reduce_sum(out * y)
        results = [first.gradient(loss, given)]
        if way == "twice":  # the same input, whose first moves no tape has recorded
            model(given)
        if way in ("twice", "two tapes"):
            with tf.GradientTape() as second:
                second.watch(given)
                loss = tf.reduce_sum(model(given) * y)
            results.append(second.gradient(loss, given))
        return results

    expected = step(whole)
    got = (tf.function(step, autograph=False) if compiled else step)(own)
    for one, other in zip(got, expected, strict=True):
        near(one, other)
