"""Sharded layers and sequences on axes within and between hosts, in both frameworks; test_hosts.py starts it.

Not called test_*.py, because on one host the adapters' tests check the same.
"""

from __future__ import annotations

import copy
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib import Communicator, Mesh
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow import tensor as tft
from commlib_torch import DistributedOptimizer, gather_state_dict, parallelize
from tests.tensorflow_adapter import test_tensor_context as keras_context
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, same, sequential, values
from tests.torch_adapter import test_tensor_context as torch_context
from tests.torch_adapter.dividing import assert_same_gradients, check, pair, random

__all__ = ["in_float64"]  # used by pytest

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)

PLAN: Any = {"up": Column(), "down": Row()}
ALONG: Any = {"up": Column(sequence=1), "down": Row(sequence=1)}


@pytest.fixture(params=["within", "between"])
def mesh(comm: Communicator, request: Any) -> Mesh:
    """Axes of 2 x 2: tp on a host and dp between hosts, or the other way round. In other layouts, tp has all ranks."""
    if comm.size % 2:
        return Mesh(dp=1, tp=-1)
    return Mesh(dp=-1, tp=2) if request.param == "within" else Mesh(tp=2, dp=-1)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def test_torch_layers(comm: Communicator, mesh: Mesh) -> None:
    """Between hosts the gradient of an input is reduced while that of the weight is computed."""
    x = random(2, 5, 6)
    for axis in (mesh["tp"], comm):
        models = pair(axis, MLP, PLAN)
        assert models.divided.up.axis.overlaps or axis.one_node
        check(axis, models, x)
        along = pair(axis, MLP, ALONG)
        own = x.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_()
        along.divided(own).pow(2).sum().backward()
        along.plain(x).pow(2).sum().backward()
        assert_same_gradients(along)


def test_torch_replicas(mesh: Mesh) -> None:
    torch.manual_seed(0)
    plain = MLP().double()
    divided = parallelize(copy.deepcopy(plain), mesh["tp"], PLAN)
    dp, x = mesh["dp"], random(8, 6)
    whole = torch.optim.AdamW(plain.parameters(), 0.01)
    own: Any = DistributedOptimizer(
        torch.optim.AdamW(divided.parameters(), 0.01), divided.named_parameters(), mesh=mesh
    )
    for _ in range(3):
        for model, optimizer, rows in ((plain, whole, x), (divided, own, x.chunk(dp.size)[dp.rank])):
            optimizer.zero_grad()
            model(rows).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(gather_state_dict(divided), dict(plain.state_dict()), rtol=1e-9, atol=1e-10)


def test_torch_codec(comm: Communicator) -> None:
    models = pair(comm, MLP, PLAN)
    divided = parallelize(copy.deepcopy(models.plain), comm, PLAN, codec="bf16")
    x = random(5, 6)
    expected = models.plain(x)
    assert (divided(x) - expected).abs().max() <= 0.03 * expected.abs().max()


def layers() -> Any:
    dense = keras.layers.Dense
    return sequential(dense(11, "tanh", name="up"), dense(6, name="down"), shape=(5, 6))


def test_keras_layers(mesh: Mesh, in_float64: None) -> None:
    same(layers, PLAN, mesh["tp"], values(2, 5, 6))


def test_keras_layers_of_all_ranks(comm: Communicator, in_float64: None) -> None:
    same(layers, ALONG, comm, values(2, 5, 6), sequence=1)
    same(layers, PLAN, comm, values(2, 5, 6), compiled=False)


def test_keras_replicas(comm: Communicator, mesh: Mesh, in_float64: None) -> None:
    from commlib_tensorflow import DistributedOptimizer as OfKeras

    dp, (x, y) = mesh["dp"], values(2, 8, 5, 6)

    def trained() -> Any:
        plain = layers()
        plain.compile(keras.optimizers.Adam(0.01), "mse")
        plain.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        return plain.predict(x[:7], batch_size=4, verbose=0)

    expected = alone(comm, trained)
    divided = tft.parallelize(layers(), mesh["tp"], PLAN)
    divided.compile(OfKeras(keras.optimizers.Adam(0.01), mesh=mesh), "mse")
    mine = [part.reshape(2, dp.size, 4 // dp.size, 5, 6)[:, dp.rank].reshape(-1, 5, 6) for part in (x, y)]
    divided.fit(*mine, batch_size=4 // dp.size, shuffle=False, verbose=0)
    near(divided.predict(x[:7], batch_size=4, verbose=0), expected, 1e-9)


def test_keras_codec(comm: Communicator, in_float64: None) -> None:
    plain, divided = layers(), layers()
    tft.parallelize(divided, comm, PLAN, codec="bf16")
    x = values(2, 5, 6)
    near(divided(x), plain(x), 3e-2)
    assert np.any(np.asarray(divided(x)) != np.asarray(plain(x)))


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sequences(comm: Communicator, method: str) -> None:
    """Of odd length, causal, packed; the ring's exchanges overlap with computing."""
    for documents in (None, (0, 5, 6, 11)):
        whole = [torch_context.drawn(4, 11, 6, seed) for seed in (1, 2, 3)]
        torch_context.compare(comm, (whole[0], whole[1], whole[2]), documents=documents, method=method)
        inputs = [keras_context.drawn(4, 11, 6, seed) for seed in (1, 2, 3)]
        keras_context.compare(comm, inputs, documents=documents, method=method, graph=documents is not None)
