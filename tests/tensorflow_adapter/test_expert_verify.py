"""Verification of mixtures against dense ones: valid ones pass, and a fault on one rank is named on all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.expert.experts import Experts
from commlib_tensorflow.expert import MoE, expertize, verify
from tests.inputs.keras_pipelines import in_float64

__all__ = ["in_float64"]  # a fixture

WIDTH = 6


def mlp(name: str) -> Any:
    layers = [keras.layers.Dense(8, "gelu"), keras.layers.Dense(WIDTH)]
    return keras.Sequential([keras.Input((5, WIDTH)), *layers], name=name)


def make() -> Any:
    keras.utils.set_random_seed(0)
    x = given = keras.Input((5, WIDTH))
    x = x + mlp("mlp")(keras.layers.Dense(WIDTH)(x))
    x = keras.layers.BatchNormalization()(x + mlp("other")(x))
    return keras.Model(given, [keras.layers.Dense(2)(x), x])


def batch(comm: Any) -> Any:
    return np.random.default_rng(comm.rank).normal(size=(3, 5, WIDTH))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden": {"hidden": 4, "gated": True, "shared": 1, "top_k": 3},
    "capacity": {"capacity_factor": 0.75, "capacity_over": "all", "hidden": 4},
    "sigmoid": {
        "scores": "sigmoid",
        "scale": 2.5,
        "hidden": 4,
        "gated": True,
        "shared": 1,
        "bias_rate": 0.1,
        "chunks": 2,
    },
}


@pytest.mark.parametrize("option", ["verify", "example"])
def test_copies_of_one_mlp_pass(comm: Any, option: str) -> None:
    """Regression: the router's gradient is zero except for rounding, and was reported to differ entirely."""
    expertize(make(), comm, {"mlp": Experts(2 * comm.size, copy=True)}, **{option: batch(comm)})


@pytest.mark.parametrize("name", ["plain", "capacity", "sigmoid", "hidden"])
def test_valid_mixtures_pass(comm: Any, name: str) -> None:
    """They leave no trace: statistics, losses and variables are unchanged."""
    options = {"count": 4 * comm.size, "top_k": 2, **OPTIONS[name]}
    model, plan = make(), {"mlp": Experts(**options), "other": Experts(**{**options, "top_k": 1})}
    expertize(model, comm, plan, **{"example" if name == "plain" else "verify": batch(comm)})
    before = [variable.numpy() for variable in model.variables]
    verify(model, batch(comm))
    assert all(map(np.array_equal, before, [variable.numpy() for variable in model.variables]))
    layers = [layer for layer in model.layers if isinstance(layer, MoE)]
    assert not model.losses and [layer.stats().tokens for layer in layers] == [0, 0]


@pytest.mark.parametrize("spoil", ["output", "router"])
def test_a_fault_is_named(comm: Any, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the layer or weight, the difference and the ranks; the model is unchanged."""
    plain = MoE.call

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        out = plain(self, inputs, training=training, mask=mask)
        if comm.rank != comm.size - 1:
            return out
        router = keras.ops.cast(self.router, out.dtype)
        return (
            out * 1.001 if spoil == "output" else out + 0.01 * keras.ops.sum(router - keras.ops.stop_gradient(router))
        )

    monkeypatch.setattr(MoE, "call", call)
    model = make()
    layers, variables = list(map(type, model.layers)), [tuple(variable.shape) for variable in model.variables]
    text = "the output of mlp" if spoil == "output" else "the gradient of .*router"
    with pytest.raises(UsageError, match=rf"{text}.* differs from a dense mixture's.*on rank {comm.size - 1} of"):
        expertize(model, comm, {"mlp": Experts(2 * comm.size, hidden=4)}, verify=batch(comm))
    assert (list(map(type, model.layers)), [tuple(v.shape) for v in model.variables]) == (layers, variables)
    model(batch(comm))


def test_a_model_without_experts(comm: Any) -> None:
    with pytest.raises(UsageError, match="no mixture of experts"):
        verify(make(), batch(comm))
