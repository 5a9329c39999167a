"""Keras models that get experts: other weights are broadcast from rank 0, and the structure is compared."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow import DistributedOptimizer, broadcast_variables, gather_weights
from commlib_tensorflow.expert import expertize

L = keras.layers
WIDTH = 4


class Scaled(keras.layers.Layer):  # type: ignore[misc]
    """An MLP whose call uses an attribute."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.up, self.down = L.Dense(6, "gelu"), L.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 6))

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


def dense(seed: int, mlp: Any = None, momentum: float = 0.9) -> Any:
    keras.utils.set_random_seed(seed)
    x = keras.Input((3, WIDTH))
    mlp = mlp or keras.Sequential([keras.Input((3, WIDTH)), L.Dense(6, "gelu"), L.Dense(WIDTH)], name="mlp")
    hidden = L.BatchNormalization(momentum=momentum, name="norm")(L.Dense(WIDTH, name="first")(x))
    return keras.Model(x, mlp(L.Dropout(0.1, name="drop")(hidden)))


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"mlp": Experts(2 * comm.size, **options)}


@pytest.mark.parametrize("broadcasts", [False, True])
def test_ranks_with_different_seeds_get_the_model_of_rank_0(comm: Communicator, broadcasts: bool) -> None:
    """Regression: besides the shared experts, ranks silently kept different weights."""
    mesh = Mesh(dp=-1)
    plain, expected = dense(comm.rank), dense(0)
    seeds = plain.get_layer("drop").seed_generator.state.numpy()
    model = expertize(plain, mesh, plan(comm))
    for one, other in zip(model.get_layer("first").weights, expected.get_layer("first").weights, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model.get_layer("drop").seed_generator.state, seeds)  # each rank has its own
    if broadcasts:
        broadcast_variables(model.variables, 0)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh), "mse")
    x = np.random.default_rng(comm.rank).normal(size=(4, 3, WIDTH)).astype(np.float32)
    model.fit(x, np.sin(x), batch_size=2, verbose=0)
    trained = comm.all_gather_object([value.tobytes() for value in gather_weights(model) if value.ndim == 2])
    assert trained.count(trained[0]) == comm.size
    mesh.close()


def test_structures_of_models_are_compared(comm: Communicator) -> None:
    """Regression: only shapes of the rest of the model were compared, and no strings, integers or tensors of MLPs."""
    if comm.size == 1:
        return
    odd = int(comm.rank == 1)
    with pytest.raises(MismatchError, match=r"momentum=0\.9' on rank 0"):
        expertize(dense(0, momentum=0.9 + 0.05 * odd), comm, plan(comm))
    for values in (("tanh", "relu"), (1, 2), (tf.constant([1.0, 2.0]), tf.constant([2.0, 1.0]))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mlp = Scaled(name="mlp")
            mlp.scale = values[odd]
            expertize(dense(0, mlp), comm, plan(comm))
        messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
        assert len(messages) == (comm.rank == 0), caught
        if messages:
            assert "Scaled: scale is " in messages[0]
    act = ("gelu", "tanh")[odd]
    inner = keras.Sequential([keras.Input((3, WIDTH)), L.Dense(6, act), L.Dense(WIDTH)], name="mlp")
    expertize(dense(0, inner), comm, plan(comm, hidden=3))


def test_a_layer_that_is_no_plain_mlp_is_refused(comm: Communicator) -> None:
    """Regression: the error called a mixture an MLP with another fault."""
    built = expertize(dense(0), comm, plan(comm))
    with pytest.raises(UsageError, match="expertize: mlp is a mixture of experts already"):
        expertize(built, comm, plan(comm))
    inner = keras.Sequential([keras.Input((3, WIDTH)), L.Dense(6, lambda x: x), L.Dense(WIDTH)], name="mlp")
    with pytest.raises(
        UsageError, match=r"mlp cannot be made from its configuration \(TypeError: .*'Dense'\): .*lambda"
    ) as raised:
        expertize(dense(0, inner), comm, plan(comm))
    assert len(str(raised.value)) < 500
    for place in (None, 0):
        model = dense(0)
        layer = model.get_layer("mlp") if place is None else model.get_layer("mlp").layers[place]
        original = layer.call
        layer.call = lambda x, call=original, **options: call(x) * 2
        with pytest.raises(UsageError, match="has state that its configuration lacks"):
            expertize(model, comm, plan(comm))
