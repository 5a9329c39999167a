"""Rebalancing moves all state of experts between ranks: optimizer state and copies of the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow import Checkpoint, gather_weights
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.elastic import TensorFlowKerasState
from commlib_tensorflow.expert import MoE, expertize, rebalance_experts

pytestmark = pytest.mark.ranks(min=2)
O = keras.optimizers  # noqa: E741
WIDTH = 6


def build(ranks: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = given = keras.Input((3, WIDTH))
    for name in ("first", "second"):
        x = x + MoE(Experts(8, top_k=2, hidden=4), ranks, name=name)(x)
    return keras.Model(given, x)


def busy(model: Any) -> None:
    """Make the experts of the first rank the most popular."""
    for layer in (one for one in model.layers if isinstance(one, MoE)):
        layer.stats()
        load = [9.0 if owner == 0 else 1.0 for owner in layer.mixture.placement.owners]
        layer.mixture.counted.numbers[:] = [*load, sum(load), 0, 0]


def step(model: Any, optimizer: Any, number: int) -> None:
    """Update with random gradients for the whole model."""
    draw, variables = np.random.default_rng(number), model.trainable_variables
    gradients = []
    for variable in variables:
        shard = shard_of(variable)
        gradient = draw.normal(size=variable.shape if shard is None else shard.sharding.shape).astype(np.float32)
        gradients.append(tf.constant(gradient if shard is None else shard.own(gradient)))
    optimizer.apply(gradients, variables)


def whole(weight: Any, value: Any) -> Any:
    shard = shard_of(weight)
    return value.numpy() if shard is None else shard.whole(value.numpy())


def owners(model: Any) -> list[Any]:
    return [one.mixture.placement.owners for one in model.layers if isinstance(one, MoE)]


MAKERS: dict[str, Callable[[], Any]] = {
    "averages": lambda: O.Adam(0.05, use_ema=True, ema_momentum=0.5),
    "passes": lambda: O.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "two": lambda: O.MultiOptimizer(O.OptimizerMap(O.Adam(0.05), {".*router": O.SGD(0.05, momentum=0.9)})),
}


@pytest.mark.parametrize("name", ["averages", "passes", "two"])
def test_averages_and_copies_are_moved(comm: Communicator, name: str) -> None:
    """Regression: without the optimizer moments were not moved, and averages belonged to different experts."""
    if comm.size == 3:
        pytest.skip("8 experts")
    results = []
    for ranks in (comm.split(comm.rank, name="alone"), comm):
        model, average, optimizer = build(ranks), build(ranks), MAKERS[name]()
        for number in range(4):
            if number in (1, 2):  # also between two passes
                before = owners(model)
                busy(model)
                rebalance_experts(model, copies=[average])
                assert ranks is not comm or before != owners(model) == owners(average)
            step(model, optimizer, number)
            for mean, weight in zip(average.weights, model.weights, strict=True):
                mean.assign(0.5 * mean + 0.5 * weight)
        kept = [variable for variable in optimizer.variables if variable.name.endswith("average")]
        assert len(kept) == (len(model.trainable_variables) if name == "averages" else 0)
        averages = [whole(*pair) for pair in zip(model.trainable_variables, kept, strict=False)]
        results.append([*gather_weights(model), *gather_weights(average), *averages])
    for expected, got in zip(*results, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_checkpoint_knows_the_places_of_experts(comm: Communicator, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Regression: a resumed model loaded weights of moved experts into the wrong ones."""
    if comm.size == 3:
        pytest.skip("8 experts")
    folder = comm.broadcast_object(str(tmp_path_factory.mktemp("moved")))
    model, x = build(comm), np.random.default_rng(comm.rank).standard_normal((4, 3, WIDTH)).astype(np.float32)
    busy(model)
    rebalance_experts(model)
    expected = gather_weights(model)
    Checkpoint(folder, model=model).save(1)
    other = build(comm)
    other.set_weights([np.zeros(one.shape, one.dtype) for one in other.weights])
    assert owners(other) != owners(model)
    assert Checkpoint(folder, model=other).resume() == 1
    assert owners(other) == owners(model)
    for one, value in zip(gather_weights(other), expected, strict=True):
        np.testing.assert_array_equal(one, value)
    np.testing.assert_array_equal(other(x), model(x))


def test_a_tensorflow_checkpoint_knows_the_places_of_experts(
    comm: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Regression: it stores only variables, and restored weights of moved experts into the wrong ones."""
    if comm.size == 3:
        pytest.skip("8 experts")
    x = np.random.default_rng(comm.rank).standard_normal((4, 3, WIDTH)).astype(np.float32)
    dense = keras.layers.Dense
    given = keras.Input((3, WIDTH))
    mlp = keras.Sequential([keras.Input((3, WIDTH)), dense(8, "gelu"), dense(WIDTH)], name="mlp")
    made_of_one = expertize(keras.Model(given, mlp(given)), comm, {"mlp": Experts(8)})
    for model in (build(comm), made_of_one):
        before, expected, outputs = owners(model), gather_weights(model), model(x)
        files = tf.train.Checkpoint(model=model)
        path = files.save(str(tmp_path_factory.mktemp("own") / "files"))
        busy(model)
        rebalance_experts(model)
        assert owners(model) != before
        files.restore(path).assert_consumed()
        assert owners(model) == before
        for one, value in zip(gather_weights(model), expected, strict=True):
            np.testing.assert_array_equal(one, value)
        np.testing.assert_array_equal(model(x), outputs)


def test_elastic_state_knows_the_places_of_experts(comm: Communicator) -> None:
    """Regression: state restored after a move had weights of the wrong experts."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model, x = build(comm), np.random.default_rng(comm.rank).standard_normal((4, 3, WIDTH)).astype(np.float32)
    state = TensorFlowKerasState(model)
    before, expected, outputs = owners(model), gather_weights(model), model(x)
    busy(model)
    rebalance_experts(model)
    assert owners(model) != before
    state.restore()
    assert owners(model) == before
    for one, value in zip(gather_weights(model), expected, strict=True):
        np.testing.assert_array_equal(one, value)
    np.testing.assert_array_equal(model(x), outputs)


def test_other_copies_are_refused(comm: Communicator) -> None:
    """They are refused on all ranks before anything moves."""
    if comm.size == 3:
        pytest.skip("8 experts")
    model = build(comm)
    for other in (keras.Sequential([keras.Input((3, WIDTH)), keras.layers.Dense(2)]), model):
        busy(model)
        with pytest.raises(
            UsageError, match=r"one of copies=, has no mixture like first .*made and moved in the same way"
        ):
            rebalance_experts(model, copies=[other])
    before, other = gather_weights(model), build(comm)
    busy(model)
    with pytest.raises(MismatchError, match=r"rebalance_experts: first.*copy 1"):
        rebalance_experts(model, copies=[] if comm.rank else [other])
    for one, value in zip(before, gather_weights(model), strict=True):
        np.testing.assert_array_equal(one, value)


@pytest.mark.parametrize("copied", [copy.deepcopy, keras.models.clone_model, pickle.dumps])
def test_refused_copies_give_advice(comm: Communicator, copied: Callable[[Any], Any]) -> None:
    """Regression: the error only stated that a copy has no configuration."""
    with pytest.raises(UsageError, match=r"for a copy construct another model, and load gather_weights\(model\)"):
        copied(build(comm))
