"""Layers on divided features, between a Column and its Row: batch and group norms, and PReLU."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Sequence
from commlib_tensorflow.tensor import gather_model, gather_weights, parallelize
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

L = keras.layers
X, Y = values(6, 3, 3, 2, seed=1), values(6, 2, seed=2)
NORMS: Any = {"bn": Sequence(-1), "gn": Sequence(3), "p": Sequence(-1), "shared": Sequence(3)}


def make() -> Any:
    """conv-BN-PReLU-GN-conv; a bias before the norm would have a gradient of mere rounding."""
    keras.utils.set_random_seed(0)
    between = [
        L.BatchNormalization(name="bn"),
        L.PReLU("uniform", shared_axes=[1, 2], name="p"),
        L.GroupNormalization(4, name="gn"),
        L.PReLU("uniform", shared_axes=[1, 2, 3], name="shared"),
    ]
    model = keras.Sequential(
        [keras.Input((3, 3, 2)), L.Conv2D(8, 2, use_bias=False, name="up"), *between, L.Conv2D(2, 2, name="down")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    return model


def train(model: Any) -> list[float]:
    model.run_eagerly = True  # a gathered model does not have it
    return [float(model.train_on_batch(X, Y[:, None, None])) for _ in range(2)]


@pytest.mark.parametrize("plan", ["auto", NORMS], ids=["auto", "plan"])
def test_weights_of_features_are_divided_with_them(comm: Any, plan: Any) -> None:
    """Regression: conv-BN-conv was refused. Each channel has its own statistics, and each rank some channels."""
    plain, divided = make(), make()
    result = plan if plan == "auto" else {"up": Column(), "down": Row(), **plan}
    if comm.size == 3:  # of 4 groups, which stay whole: 3, 3 and 2 channels are none
        with pytest.raises(UsageError, match="its 4 groups cannot be split"):
            parallelize(divided, comm, result, example=X, report=lambda table: None)
        return
    parallelize(divided, comm, result, report=lambda table: None)
    assert all(isinstance(divided.get_layer(name).style, Sequence) for name in NORMS)
    near(train(divided), train(plain))
    for got, expected in zip(gather_weights(divided), plain.get_weights(), strict=True):
        near(got, expected, 1e-10)
    assert divided.get_layer("bn").moving_mean.shape == (len(np.array_split(range(8), comm.size)[comm.rank]),)
    near(divided(X), plain(X), 1e-10)  # with moving statistics
    whole = gather_model(divided)
    near(train(whole), train(plain), 1e-10)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("column", "norm", "style", "text"),
    [
        (Column(parts=2), L.BatchNormalization(name="bn"), Sequence(-1), "bn .* 2 fused parts"),
        (Column(), L.BatchNormalization(name="bn"), Sequence(1), r"mixes all of the others.* Sequence\(2\)"),
        (Column(), L.BatchNormalization(name="bn"), None, r"bn .*give it Sequence\(2\)"),
        (Column(), L.BatchNormalization(center=False, scale=False, name="bn"), None, r"bn .*give it Sequence\(2\)"),
        (Column(), L.BatchNormalization(trainable=False, name="bn"), None, r"bn .*give it Sequence\(2\)"),
        (Column(), L.GroupNormalization(2, center=False, scale=False, name="bn"), None, r"bn .*give it Sequence\(2\)"),
        (Column(), L.GroupNormalization(1, name="bn"), Sequence(-1), "1 units .* cannot be split"),
        (Column(gather=True), L.BatchNormalization(name="bn"), Sequence(-1), "its input is unsharded"),
    ],
    ids=["parts", "dimension", "no style", "no weights", "frozen", "groups alone", "one group", "whole"],
)
def test_mismatched_styles_are_refused(comm: Any, column: Any, norm: Any, style: Any, text: str) -> None:
    """A rank's weights must match its features."""
    model = keras.Sequential([keras.Input((3, 4)), L.Dense(8, name="up"), norm, L.Dense(2, name="down")])
    plan = {"up": column, "down": Row(split=column.gather)} | ({} if style is None else {"bn": style})
    with pytest.raises(UsageError, match=text):
        parallelize(model, comm, plan)


@pytest.mark.ranks(min=2)
def test_as_many_groups_as_ranks(comm: Any) -> None:
    """For a divided norm with one group, the first call determines the groups of the whole."""

    def model() -> Any:
        keras.utils.set_random_seed(0)
        norm = L.GroupNormalization(comm.size, name="gn")
        dense = L.Dense(4 * comm.size, name="up"), norm, L.Dense(3, name="down")
        return keras.Sequential([keras.Input((5,)), *dense])

    plain, divided = model(), model()
    parallelize(divided, comm, {"up": Column(), "gn": Sequence(-1), "down": Row()})
    x = np.random.default_rng(0).normal(size=(2, 5))
    near(divided(x), plain(x))
