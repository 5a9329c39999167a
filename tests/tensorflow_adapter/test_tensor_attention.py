"""Divided attention of Keras, and whole blocks, equal undivided ones."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Sequence, Vocabulary
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor import ParallelAttention, ParallelMLP, gather, parallelize, scatter
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import EXACT, in_float64, near, same, values, words

__all__ = ["in_float64"]

L = keras.layers
LENGTH, WIDTH = 5, 6


def attention(**options: Any) -> Any:
    return L.MultiHeadAttention(**{"num_heads": 5, "key_dim": 3, "name": "a", **options})


def grouped(**options: Any) -> Any:
    return L.GroupQueryAttention(
        **{"head_dim": 3, "num_query_heads": 10, "num_key_value_heads": 5, "name": "a", **options}
    )


def over(layer: Any, inputs: int = 1, masks: bool = False, **call: Any) -> Any:
    """A model of attention only: of a query, of a query and a value of another length, or of three inputs."""
    given = [keras.Input((None, WIDTH)) for _ in range(inputs)]
    taken = [L.Masking(0.0)(x) for x in given] if masks else given
    return filled(keras.Model(given, layer(*(taken * 2 if inputs == 1 else taken), **call)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("make", "inputs", "call"),
    [
        (attention, 1, {}),
        (lambda: attention(value_dim=2, use_bias=False), 2, {}),
        (lambda: attention(use_gate=True), 1, {"use_causal_mask": True}),
        (lambda: attention(sliding_window=2, output_shape=4), 3, {}),
        (attention, 1, {"return_attention_scores": True, "use_causal_mask": True}),
        (grouped, 1, {}),
        (lambda: grouped(use_gate=True), 2, {}),
        (grouped, 1, {"return_attention_scores": True, "use_causal_mask": True}),
    ],
)
def test_attention(comm: Any, make: Any, inputs: int, call: Any, compiled: bool) -> None:
    x = [values(2, LENGTH, WIDTH, seed=number) for number in range(inputs)]
    same(lambda: over(make(), inputs, **call), {"a": Column()}, comm, *x, compiled=compiled)


@pytest.mark.parametrize("make", [attention, grouped])
def test_attention_with_implicit_masks(comm: Any, make: Any) -> None:
    """Keras attaches masks to tensors, and a copy of a tensor keeps its mask."""
    x = [values(2, LENGTH, WIDTH, seed=number) for number in range(2)]
    x[0][0, 3:], x[1][1, 2:] = 0, 0
    same(lambda: over(make(), 2, masks=True), {"a": Column()}, comm, *x)
    same(lambda: over(make(), 2, masks=True), {"a": Column(sequence=1)}, comm, *x, sequence=1)


@pytest.mark.parametrize("make", [attention, grouped])
def test_attention_with_a_mask(comm: Any, make: Any) -> None:
    class Masked(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.a = make()

        def call(self, x: Any) -> Any:
            mask = tf.constant(values(2, LENGTH, LENGTH, seed=5) > 0)
            return self.a(x, x, attention_mask=mask, use_causal_mask=True)

    def build() -> Any:
        model = Masked()
        model(values(2, LENGTH, WIDTH))
        return filled(model)

    same(build, {"a": Column()}, comm, values(2, LENGTH, WIDTH))


class MaskedByHeads(keras.Model):  # type: ignore[misc]
    """A model that keeps its mask as a constant tensor."""

    def __init__(self, layer: Any, heads: int) -> None:
        super().__init__()
        self.a, mask = layer, values(2, heads, LENGTH, LENGTH, seed=5) > 0
        mask[..., 0] = True
        self.mask = tf.constant(mask)

    def call(self, x: Any) -> Any:
        return self.a(x, x, attention_mask=self.mask)


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (attention, 5),
        (lambda: attention(dropout=0.1), 1),
        (grouped, 10),
    ],
)
def test_attention_with_a_mask_for_each_head(comm: Any, make: Any, heads: int) -> None:
    """Regression: a rank used the mask of all heads for its own, which failed or used other heads' masks."""

    def build() -> Any:
        model = MaskedByHeads(make(), heads)
        model(values(2, LENGTH, WIDTH))
        return filled(model)

    same(build, {"a": Column()}, comm, values(2, LENGTH, WIDTH))


@pytest.mark.parametrize("make", [attention, grouped])
def test_attention_on_a_sequence(comm: Any, make: Any) -> None:
    def model() -> Any:
        return over(make(), use_causal_mask=True)

    same(model, {"a": Column(sequence=1)}, comm, values(2, LENGTH, WIDTH), sequence=1)


def test_invalid_attention_is_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="whose units are heads"):
        parallelize(over(attention()), comm, {"a": Column(gather=True)})
    if comm.size > 1:
        with pytest.raises(UsageError, match="1 units along dimension 1"):
            parallelize(over(attention(num_heads=1)), comm, {"a": Column()})


def test_dropout_of_attention(comm: Any) -> None:
    """Each rank drops different places; whole tensors stay equal on all."""
    own = over(attention(dropout=0.5, num_heads=4), return_attention_scores=True)
    parallelize(own, comm, {"a": Column()})
    x = tf.constant(values(2, LENGTH, WIDTH))
    outputs = [own(x, training=True)[0] for _ in range(2)]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
    for out in outputs:
        near(comm.broadcast(out.numpy()), out)


def encoder() -> Any:
    """Two transformer layers with an embedding and logits."""
    given = keras.Input((None,), dtype="int32")
    x = L.Embedding(11, WIDTH, mask_zero=True, name="words")(given)
    for number in range(2):
        y = L.LayerNormalization(name=f"norm_{number}")(x)
        x = L.Add(name=f"first_{number}")([x, L.MultiHeadAttention(5, 3, name=f"attention_{number}")(y, y)])
        y = L.Dense(7, "gelu", name=f"up_{number}")(L.LayerNormalization(name=f"second_norm_{number}")(x))
        x = L.Add(name=f"second_{number}")([x, L.Dense(WIDTH, name=f"down_{number}")(y)])
    return filled(keras.Model(given, L.Dense(11, name="head")(x)))


@pytest.mark.parametrize("sequence", [None, 1])
def test_encoder(comm: Any, sequence: int | None) -> None:
    plan: dict[str, Any] = {
        "words": Vocabulary(sequence=sequence),
        "attention_?": Column(sequence=sequence),
        "up_*": Column(sequence=sequence),
        "down_*": Row(sequence=sequence),
        "head": Vocabulary(gather=True, sequence=sequence),
    }
    if sequence is not None:
        plan["*norm_*"] = Sequence()
    same(encoder, plan, comm, words(11, 2, LENGTH))


@pytest.mark.parametrize(
    ("options", "sequence"),
    [
        ({}, None),
        ({"kv_heads": 4, "causal": True}, 1),
        ({}, 1),
        ({"kv_heads": 4, "causal": True}, None),
        ({"bias": False}, None),
        ({"bias": False}, 1),
    ],
)
def test_parallel_attention(comm: Any, options: Any, sequence: int | None) -> None:
    """On one rank it matches the undivided layer with the same weights."""
    _same_block(comm, lambda axis: ParallelAttention(24, 8, axis, sequence=sequence, **options), 24, sequence)


@pytest.mark.parametrize(
    ("options", "sequence"),
    [
        ({}, None),
        ({"gated": True, "activation": "silu"}, 1),
        ({}, 1),
        ({"gated": True, "activation": "silu"}, None),
        ({"bias": False}, None),
        ({"bias": False}, 1),
    ],
)
def test_parallel_mlp(comm: Any, options: Any, sequence: int | None) -> None:
    _same_block(comm, lambda axis: ParallelMLP(WIDTH, 7, axis, sequence=sequence, **options), WIDTH, sequence)


def _same_block(comm: Any, make: Any, width: int, sequence: int | None) -> None:
    alone = comm.split(comm.rank)
    x, wanted = tf.constant(values(2, 7, width)), tf.constant(values(2, 7, width, seed=1))
    results = []
    for axis in (alone, comm):
        keras.utils.set_random_seed(3)
        layer = make(axis)

        @tf.function(autograph=False)
        def step(layer: Any = layer, axis: Any = axis) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                out = layer(x) if sequence is None else gather(layer(scatter(x, axis, 1)), axis, 1)
                loss = tf.reduce_sum(out * wanted)
            return out, *tape.gradient(loss, [x, *layer.trainable_variables])

        layer(x if sequence is None else scatter(x, axis, 1))
        results.append((layer, step()))
    for number, (expected, got) in enumerate(zip(results[0][1], results[1][1], strict=True)):
        variable = results[1][0].trainable_variables[number - 2] if number > 1 else None
        shard = None if variable is None else shard_of(variable)
        near(got, expected if shard is None else shard.own(np.asarray(expected)), EXACT, f"{number}")


@pytest.mark.any_ranks
@pytest.mark.parametrize(("kv_heads", "causal"), [(8, False), (2, True), (1, True)])
def test_parallel_attention_matches_keras(comm: Any, kv_heads: int, causal: bool) -> None:
    """With Keras' own as the oracle, masks included."""
    axis, features = comm.split(comm.rank), 4  # the square root of 4 is exact in float32, in which Keras has it
    plain = L.GroupQueryAttention(features, 8, kv_heads)
    x, mask = values(2, LENGTH, 32), values(2, 1, LENGTH, LENGTH, seed=5) > -0.5
    mask[..., 0] = True
    plain(x, x)
    for variable in plain.trainable_variables:
        variable.assign(values(*variable.shape, seed=sum(map(ord, variable.path[-9:]))))
    own = ParallelAttention(32, 8, axis, kv_heads=kv_heads, causal=causal)
    own(x)
    by_path = {"/".join(one.path.split("/")[-2:]): one.numpy() for one in plain.trainable_variables}
    for name, shape in (("kernel", (32, -1)), ("bias", (-1,))):
        parts = [by_path[f"{part}/{name}"].reshape(shape) for part in ("query", "key", "value")]
        getattr(own.qkv, name).assign(np.concatenate(parts, -1))
    own.output_dense.kernel.assign(by_path["attention_output/kernel"].reshape(32, 32))
    own.output_dense.bias.assign(by_path["attention_output/bias"])
    for options in ({}, {"attention_mask": mask}):
        # Without scores, Keras computes the softmax in float32.
        expected, _ = plain(x, x, use_causal_mask=causal, return_attention_scores=True, **options)
        near(own(x, **options), expected)


def test_dropout_of_parallel_attention(comm: Any) -> None:
    layer, x = ParallelAttention(24, 8, comm, dropout=0.5), tf.constant(values(2, LENGTH, 24))
    first, second = layer(x, training=True), layer(x, training=True)
    assert np.any(np.asarray(first) != np.asarray(second))
    near(comm.broadcast(first.numpy()), first)
    near(layer(x), layer(x))


def test_invalid_blocks_are_refused(comm: Any) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"heads": 5}, "multiple"), ({"kv_heads": 3}, "multiple"), ({"dropout": 1.0}, "dropout"),
    ]  # fmt: skip
    for options, text in cases:
        with pytest.raises(UsageError, match=text):
            ParallelAttention(16, **{"heads": 4, "ranks": comm, **options})
    with pytest.raises(UsageError, match="all hidden features"):
        ParallelMLP(4, 8, comm, activation="softmax")
    with pytest.raises(UsageError, match="width=4"):
        ParallelMLP(4, 8, comm)(values(2, 5))
