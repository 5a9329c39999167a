"""Layer state besides weights is broadcast from rank 0 or reported."""

from __future__ import annotations

import re
import types
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator
from commlib.expert import Experts
from commlib_tensorflow.expert import expertize

L = keras.layers
WIDTH = 4


def _closed(values: Any) -> Any:
    def get() -> Any:
        return values

    return get


PUT = {
    "attribute": lambda v: v,
    "list": lambda v: ["a", v],
    "tuple": lambda v: (v,),
    "dict": lambda v: {"a": {"b": v}},
    "namespace": lambda v: types.SimpleNamespace(a=v),
    "closure": _closed,
}


def _taken(kept: Any) -> Any:
    """Return the stored values."""
    while not (isinstance(kept, np.ndarray) or hasattr(kept, "numpy")):
        if isinstance(kept, dict):
            kept = next(iter(kept.values()))
        elif isinstance(kept, list | tuple):
            kept = kept[-1]
        else:
            kept = kept() if callable(kept) else kept.a
    return kept


class Features(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, kept: Any, **options: Any) -> None:
        super().__init__(**options)
        self.kept_values = kept

    def call(self, x: Any) -> Any:
        return x * tf.cast(tf.convert_to_tensor(_taken(self.kept_values)), x.dtype)


def model(kept: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = keras.Input((3, WIDTH))
    mlp = keras.Sequential([keras.Input((3, WIDTH)), L.Dense(6, "gelu"), L.Dense(WIDTH)], name="mlp")
    features = Features(None, name="features")
    features.kept_values = np.zeros(WIDTH, np.float32)
    built = keras.Model(x, mlp(features(x)))
    features.kept_values = kept
    return built


def plan(comm: Communicator) -> dict[str, Experts]:
    return {"mlp": Experts(2 * comm.size)}


def drawn(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=WIDTH).astype(np.float32)


@pytest.mark.parametrize("kind", [np.asarray, lambda v: tf.Variable(v, trainable=False)])
@pytest.mark.parametrize("put", PUT)
def test_variables_and_arrays_are_broadcast_from_rank_0(comm: Communicator, put: str, kind: Any) -> None:
    """Regression: each rank silently kept its own random features."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "expertize")
        built = expertize(model(PUT[put](kind(drawn(comm.rank)))), comm, plan(comm))
    np.testing.assert_array_equal(_taken(built.get_layer("features").kept_values), drawn(0))
    expected = expertize(model(drawn(0)), comm, plan(comm))
    x = np.random.default_rng(9 + comm.rank).normal(size=(2, 3, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(built(x), expected(x))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("values", "name"),
    [
        (lambda odd: tf.constant([0.5 + odd]), r"kept_values \(tensor .*float32.*\[1\]\) has different values"),
        (
            lambda odd: {"a": tf.constant([0.5 + odd])},
            r"kept_values\['a'\] \(tensor .*float32.*\[1\]\) has different values",
        ),
        (
            lambda odd: types.SimpleNamespace(scale=0.5 + odd),
            r"kept_values\.scale is 0\.5 on rank 0 and 1\.5 on rank 1",
        ),
        (lambda odd: [0.5 + odd], r"kept_values is (list|TrackedList) of 1: 0\.5 on rank 0"),
        (lambda odd: types.SimpleNamespace(perm=[odd, 1 - odd]), r"kept_values\.perm is list of 2: 0, 1 on rank 0"),
    ],
)
def test_a_value_that_cannot_be_broadcast_is_warned_of(comm: Communicator, values: Any, name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expertize(model(values(int(comm.rank == 1))), comm, plan(comm))
    messages = [str(one.message) for one in caught if "ranks hold different models" in str(one.message)]
    assert len(messages) == (comm.rank == 0), caught
    for text in messages:
        assert re.search(rf"expertize: layer \d, Features: {name}", text), text


def test_values_that_identify_the_rank_cause_no_warning(comm: Communicator) -> None:
    for own in (comm.rank, [comm.rank], {"rank": comm.rank}, f"cuda:{comm.rank}"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "expertize")
            expertize(model(own), comm, plan(comm))


@pytest.mark.ranks(min=2)
def test_values_are_restored_if_verify_refuses(comm: Communicator) -> None:
    plain = model({"a": drawn(comm.rank)})
    with pytest.raises(ValueError, match="expected shape"):
        expertize(plain, comm, plan(comm), verify=np.zeros((2, 3, WIDTH + 1), np.float32))
    np.testing.assert_array_equal(_taken(plain.get_layer("features").kept_values), drawn(comm.rank))
