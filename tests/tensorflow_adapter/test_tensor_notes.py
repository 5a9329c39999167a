"""What is divided knows it wherever it goes: parts of weights were taken for whole ones, and averaged in silence."""

from __future__ import annotations

import copy
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor import Column, Row
from commlib_tensorflow.keras import callbacks
from commlib_tensorflow.tensor import parallelize

PLAN: Any = {"up": Column(), "down": Row()}


def model_on(axis: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(6, name="down")]
    return parallelize(keras.Sequential(layers), axis, PLAN)


def fit(model: Any, optimizer: Any, callbacks: Any = ()) -> None:
    x = np.ones((4, 6), np.float32)
    model.compile(optimizer, "mse")
    model.fit(x, x, verbose=0, callbacks=list(callbacks))


def gradients(model: Any, variables: Any) -> Any:
    with ct.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(model(np.ones((4, 6), np.float32)) ** 2)
    return tape.gradient(loss, variables)


def distributed(**options: Any) -> Any:
    return ct.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


CALLS: dict[str, Any] = {
    "fit": lambda model: fit(model, distributed()),
    "apply": lambda model: distributed().apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables]),
    "tape": lambda model: gradients(model, model.trainable_variables),
    "tape, TensorFlow's variables": lambda model: gradients(model, [v.value for v in model.trainable_variables]),
    "broadcast": lambda model: ct.broadcast_variables(model.variables, 0),
    "callback": lambda model: fit(model, keras.optimizers.SGD(0.1), [callbacks.BroadcastGlobalVariablesCallback(0)]),
}


@pytest.mark.parametrize("call", CALLS)
def test_ranks_with_other_parts_are_never_averaged(comm: Any, call: str) -> None:
    """Without mesh= parts of different ranks were averaged; broadcast made all of them rank 0's."""
    model = model_on(comm)
    if comm.size > 1:
        with pytest.raises(UsageError, match=r"of which ranks \[\d.*have other parts.*mesh"):
            CALLS[call](model)


def test_ranks_with_the_same_part_are(comm: Any) -> None:
    mesh = Mesh(dp=-1, tp=2 if comm.size % 2 == 0 else 1)
    fit(model_on(mesh["tp"]), distributed(mesh=mesh))
    mesh.close()


def test_quantisation_of_a_divided_layer_is_refused(comm: Any) -> None:
    """Without Keras' own check it was done, with the scales of this rank's part."""
    for layer in model_on(comm).layers:
        with pytest.raises(UsageError, match=r"quantise gather_model\(model\)"):
            layer.quantize("int8", type_check=False)


def test_a_configuration_is_that_of_the_whole(comm: Any) -> None:
    model = model_on(comm)
    for made in (keras.models.clone_model(model), type(model).from_config(model.get_config())):
        assert [tuple(variable.shape) for variable in made.variables] == [(6, 8), (8,), (8, 6), (6,)]
        assert type(made.layers[0]) is keras.layers.Dense
    if comm.size > 1:
        with pytest.raises(UsageError, match="save gather_model"):
            copy.deepcopy(model)
