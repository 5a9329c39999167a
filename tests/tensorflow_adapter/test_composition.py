"""Pairs of features in `fit` without another test: training matches one process without these features.

docs/composition.py names these tests in its tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib import Mesh

WIDTH, HEADS, TOKENS, STEPS = 8, 2, 8, 3
ROUNDING = {"bfloat16": 0.03, "float16": 0.004}
"""Some roundings, of 8 and of 11 bits, of weights of about 1."""


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Restore the dtypes of Keras."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Attention and a dense layer, or experts. cp: the communicator over which sequences are sharded."""

    def __init__(self, cp: Any, experts: Any, recompute: bool) -> None:
        super().__init__()
        self.cp, self.supports_jit = cp, False
        self.qkv, self.out = keras.layers.Dense(3 * WIDTH), keras.layers.Dense(WIDTH)
        # A balance per sequence would depend on how sequences are sharded.
        options = ct.Experts(4, top_k=2, hidden=6, balance="global")
        self.mlp: Any = keras.layers.Dense(WIDTH) if experts is None else ct.MoE(options, experts)
        self.forwards = 0
        self.run = tf.recompute_grad(self.inner) if recompute else self.inner

    def build(self, shape: Any) -> None:
        for layer in (self.qkv, self.out, self.mlp):
            layer.build((None, shape[1], WIDTH))

    def inner(self, x: Any) -> Any:
        self.forwards += 1
        tokens = x.shape[1]
        heads = tf.reshape(self.qkv(x), (-1, tokens, 3, HEADS, WIDTH // HEADS))
        q, k, v = tf.unstack(tf.transpose(heads, (2, 0, 3, 1, 4)))
        if self.cp is not None:
            attended = ct.context.attention(q, k, v, self.cp, causal=True, length=TOKENS)
        else:
            scores = tf.matmul(q, k, transpose_b=True) / (WIDTH / HEADS) ** 0.5
            scores = tf.where(np.tril(np.ones((tokens, tokens), bool)), scores, scores.dtype.min)
            attended = tf.matmul(tf.nn.softmax(scores), v)
        x = x + self.out(tf.reshape(tf.transpose(attended, (0, 2, 1, 3)), (-1, tokens, WIDTH)))
        return x + tf.tanh(self.mlp(x))

    def call(self, x: Any) -> Any:
        return self.run(x)


def make(tokens: int, cp: Any = None, experts: Any = None, recompute: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((tokens, WIDTH)), *(Block(cp, experts, recompute) for _ in range(2))])


def batches(rows: int) -> Any:
    return np.random.default_rng(0).standard_normal((2, STEPS, rows, TOKENS, WIDTH)).astype(keras.config.floatx())


def fit(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    if keras.config.dtype_policy().name == "mixed_float16":  # with Keras' default scale the first steps overflow
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(optimizer, "mse", jit_compile=False)
    flat = [np.concatenate(list(each)) for each in (x, y)]
    model.fit(*flat, batch_size=x.shape[1], shuffle=False, verbose=0)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def alone(comm: Any, rows: int, policy: str, experts: bool) -> list[Any]:
    """Train in one process, without axes, recomputation or compression."""
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    model = make(TOKENS, experts=comm.split(comm.rank, name="alone") if experts else None)
    fit(model, sgd(), *batches(rows))
    return [np.asarray(each) for each in model.get_weights()]


PAIRS = [
    "dp recompute", "cp ep", "cp compression", "cp amp", "compression amp", "compression recompute", "amp recompute",
    pytest.param("ep compression", marks=pytest.mark.long),  # the same test of PyTorch always runs
]  # fmt: skip


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs(comm: Any, pair: str) -> None:
    if comm.size % 2:
        pytest.skip("4 experts, and sequences sharded among 2 ranks")
    features = pair.split()
    amp, compresses, experts = ("amp" in features, "compression" in features, "ep" in features)
    policy = "mixed_float16" if amp else "float32" if compresses or experts else "float64"
    mesh = Mesh(dp=-1, cp=2 if "cp" in features else 1)
    dp, cp = mesh["dp"], mesh["cp"]
    rows = 2 * dp.size
    expected = alone(comm, rows, policy, experts)

    def own(each: Any) -> Any:
        return np.asarray(ct.context.shard_sequence(np.split(each, dp.size)[dp.rank], cp))

    x, y = (np.stack([own(each) for each in part]) for part in batches(rows))
    recompute = "recompute" in features
    model = make(x.shape[2], cp if cp.size > 1 else None, mesh if experts else None, recompute)
    options: dict[str, Any] = {"compression": "bf16", "compress_within_node": True} if compresses else {}
    before = [np.asarray(each) for each in ct.gather_weights(model)]
    fit(model, ct.DistributedOptimizer(sgd(), mesh=mesh, **options), x, y)
    results = [np.asarray(each) for each in ct.gather_weights(model)]
    low = ROUNDING["bfloat16"] if compresses else ROUNDING["float16"]
    tolerance = low if amp or compresses else 2e-5 if experts else 1e-9
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    assert any(np.abs(now - then).max() > 0.01 for now, then in zip(results, before, strict=True))
    if amp or compresses:  # check that they had an effect
        exact = alone(comm, rows, "float32" if experts else "float64", experts)
        assert any(np.abs(now - then).max() > 1e-5 for now, then in zip(results, exact, strict=True))
    if recompute:  # traced once for the forward, and again for the backward
        plain = make(TOKENS)
        fit(plain, sgd(), x[:, :, :TOKENS], y)
        assert model.layers[0].forwards > plain.layers[0].forwards
    bits = [each.tobytes() for each in results]
    assert all(other == bits for other in comm.all_gather_object(bits))
    mesh.close()
