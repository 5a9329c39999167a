"""Bodies of tests: moves and divided layers on TensorFlow's tensors of a device compute the results of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.context_parallel import SequenceLayout
from commlib.sharding.axis import ParallelAxis
from commlib_tensorflow.tensor.context import attention

Found = dict[str, Any]
TOLERANCE = 1e-5
"""Of numbers near 1: products in float32 are added up in another order by another device, and another library."""


def _both(place: Any, run: Callable[[Callable[[Any], Any]], Found]) -> None:
    """Compare what `run` returns on the host and on the device."""
    with place.host():
        expected = run(tf.constant)
    result = run(place.put)
    assert result.keys() == expected.keys()
    for name, got in result.items():
        want = np.asarray(expected[name])
        assert np.asarray(got).shape == want.shape, name
        np.testing.assert_allclose(
            np.asarray(got), want, TOLERANCE, TOLERANCE * max(1.0, float(np.abs(want).max(initial=0)))
        )


def _drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def moves(comm: Any, place: Any, traced: bool) -> None:
    """The moves of tensor parallelism, forward and backward, with even and uneven lengths."""
    axis = ParallelAxis(comm)
    shapes = {
        "copy": (3, 4),
        "reduce": (3, 4),
        "scatter": (3, 2 * comm.size + 1),
        "reduce_scatter": (2 * comm.size + 1, 3),
    }
    calls: dict[str, Callable[[Any], Any]] = {
        "copy": lambda x: ct.tensor.copy(x, axis),
        "reduce": lambda x: ct.tensor.reduce(x, axis),
        "scatter": lambda x: ct.tensor.scatter(x, axis, 1),
        "gather": lambda x: ct.tensor.gather(x, axis, 1),
        "partial": lambda x: ct.tensor.gather(x, axis, 0, partial=True),
        "reduce_scatter": lambda x: ct.tensor.reduce_scatter(x, axis),
        "all_to_all": lambda x: ct.tensor.all_to_all(x, axis, 0, 1),
    }

    def run(put: Callable[[Any], Any]) -> Found:
        results: Found = {}
        for name, move in calls.items():

            def both(x: Any, move: Callable[[Any], Any] = move) -> tuple[Any, Any]:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = move(x)
                    loss = tf.reduce_sum(y * y)
                return y, tape.gradient(loss, x)

            x = put(_drawn(comm.rank, *shapes.get(name, (4, 6))))
            results[name], results[f"of {name}"] = (tf.function(both) if traced else both)(x)
        return results

    _both(place, run)


def sequences(comm: Any, place: Any, method: Any, traced: bool) -> None:
    """Attention over a divided sequence sends keys, values and their gradients from device to device."""
    counts = SequenceLayout(4 * comm.size + 3, comm.size, "balanced").counts
    axis = ParallelAxis(comm)

    def run(put: Callable[[Any], Any]) -> Found:
        results: Found = {}

        def both(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            with tf.GradientTape() as tape:
                tape.watch([q, k, v])
                out = attention(q, k, v, axis, causal=True, method=method, length=sum(counts))
                loss = tf.reduce_sum(out * out)
            return out, tape.gradient(loss, [q, k, v])

        call = tf.function(both) if traced else both
        for turn in range(3):  # each message reuses the slot of an earlier one
            seed = 10 * comm.rank + turn
            inputs = [put(_drawn(seed + 100 * n, 2, heads, counts[comm.rank], 6)) for n, heads in enumerate((4, 2, 2))]
            results[f"{turn}"], gradients = call(*inputs)
            results |= {f"{turn} of {name}": x for name, x in zip("qkv", gradients, strict=True)}
        return results

    _both(place, run)


def divided_layers(comm: Any, place: Any) -> None:
    """A Keras model with a plan that divides the sequence between its layers unevenly."""

    def run(put: Callable[[Any], Any]) -> Found:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((2 * comm.size + 1, 12)),
                keras.layers.Dense(24, "gelu", name="up"),
                keras.layers.Dense(12, name="down"),
            ]
        )
        model = ct.parallelize(model, comm, {"up": ct.Column(sequence=1), "down": ct.Row(sequence=1)})
        x = put(_drawn(1, 3, 2 * comm.size + 1, 12))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ct.tensor.gather(model(ct.tensor.scatter(x, comm, 1)), comm, 1)
            loss = tf.reduce_sum(y * y)
        gradients = tape.gradient(loss, [x, *(weight.value for weight in model.trainable_variables)])
        return {"y": y, **{str(number): gradient for number, gradient in enumerate(gradients)}}

    _both(place, run)


def stages(comm: Any, place: Any) -> None:
    """A pipeline sends values from device to device, forward and backward, in successive steps."""

    def run(put: Callable[[Any], Any]) -> Found:
        keras.utils.set_random_seed(4)
        dense = [keras.layers.Dense(6, activation="tanh", name=f"d{number}") for number in range(2 * comm.size)]
        model = keras.Sequential([keras.Input((6,)), *dense])
        pipe = ct.pipeline(model, comm, schedule="1f1b", microbatches=4, loss="mse")
        results: Found = {}
        for turn in range(3):
            x, y = put(_drawn(turn, 8, 6)), put(_drawn(10 + turn, 8, 6))
            results[f"loss {turn}"] = pipe.step(x, y)
            results |= {f"{turn} of {number}": gradient for number, gradient in enumerate(pipe.gradients)}
        pipe.close()
        return results

    _both(place, run)
