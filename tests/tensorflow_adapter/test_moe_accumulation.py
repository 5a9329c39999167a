"""Experts with accumulated gradients match one process, among replicas and in stages."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator, Mesh
from commlib.expert import Experts
from commlib_tensorflow import DistributedGradientTape, DistributedOptimizer, gather_weights, pipeline
from commlib_tensorflow.expert import MoE
from tests.inputs.keras_pipelines import in_float64

__all__ = ["in_float64"]  # a fixture

WIDTH, ROWS = 6, 4


def build(ranks: Any) -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((3, WIDTH))
    x = keras.layers.Dense(WIDTH)(given)
    x = x + MoE(Experts(4, top_k=2, hidden=4, balance_weight=0.1), ranks)(x)
    return keras.Model(given, keras.layers.Dense(WIDTH)(x))


def passes(own: Communicator | None) -> list[tuple[Any, Any]]:
    """Return two batches, or this rank's rows of them."""
    results = []
    for seed in range(2):
        draw = np.random.default_rng(seed)
        x, y = (draw.normal(size=(ROWS, 3, WIDTH)) for _ in range(2))
        results.append((x, y) if own is None else tuple(np.split(one, own.size)[own.rank] for one in (x, y)))
    return results  # type: ignore[return-value]


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def gradients(model: Any, x: Any, y: Any, tape: Any) -> list[Any]:
    with tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2) + tf.add_n(model.losses)
    return list(tape.gradient(loss, [variable.value for variable in model.trainable_variables]))


def alone(comm: Communicator, scale: float = 1.0) -> list[Any]:
    """Return one process' weights after two steps, each by the accumulated gradients of two batches."""
    model, optimizer = build(comm.split(comm.rank, name="alone")), sgd()
    for _ in range(2):
        first, second = (gradients(model, *one, tf.GradientTape()) for one in passes(None))
        summed = [scale * (a + b) for a, b in zip(first, second, strict=True)]
        optimizer.apply(summed, model.trainable_variables)
    result: list[Any] = model.get_weights()
    return result


def compare(result: list[Any], expected: list[Any]) -> None:
    for got, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)  # routers compute in float32


@pytest.mark.parametrize("way", ["optimizer", "tape", "steps"])
def test_several_backwards_before_a_step(comm: Communicator, way: str) -> None:
    """Sums that are reduced once, sums of reduced gradients, and sums in Keras match."""
    if comm.size == 3:
        pytest.skip("4 experts")
    mesh = Mesh(dp=-1)
    model = build(mesh)
    optimizer = sgd(**({"gradient_accumulation_steps": 2} if way == "steps" else {}))
    if way != "tape":
        optimizer = DistributedOptimizer(optimizer, mesh=mesh)
    for _ in range(2):
        results = []
        for x, y in passes(comm):
            tape = tf.GradientTape()
            tape = DistributedGradientTape(tape) if way == "tape" else tape
            results.append(gradients(model, x, y, tape))
            if way == "steps":
                optimizer.apply(results[-1], model.trainable_variables)
        if way != "steps":
            optimizer.apply([a + b for a, b in zip(*results, strict=True)], model.trainable_variables)
    compare(gather_weights(model), alone(comm, 0.5 if way == "steps" else 1.0))
    mesh.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("stages", [1, 2])
def test_several_batches_before_a_step_of_stages(comm: Communicator, stages: int) -> None:
    """One update includes gradients and router losses of two `pipe.step`."""
    if comm.size == 3:
        pytest.skip("4 experts")
    mesh = Mesh(pp=stages, dp=-1)
    pipe = pipeline(build(mesh), mesh["pp"], microbatches=2)
    pipe.compile(DistributedOptimizer(sgd(), mesh=mesh), "mse")
    for _ in range(2):
        for x, y in passes(mesh["dp"]):
            pipe.step(x, y)
        pipe.apply_gradients()
    compare(pipe.gather_weights(), alone(comm))
    pipe.close()
    mesh.close()
