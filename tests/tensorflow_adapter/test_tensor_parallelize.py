"""parallelize on models of every kind: trained by fit, they have the losses and weights of the plain model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib.tensor_parallel import Column, Replicate, Row, Sequence
from commlib_tensorflow._shards import shards_in
from commlib_tensorflow.expert import MoE
from commlib_tensorflow.tensor import ColumnDense, RowDense, gather_model, parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import alone, in_float64, near, near_shard, same, sequential, values

__all__ = ["in_float64"]

L = keras.layers
PLAN = {"up": Column(), "down": Row()}


def plain(**options: Any) -> Any:
    return sequential(L.Dense(7, "tanh", name="up", **options), L.Dense(3, name="down", **options), shape=(5,))


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [plain(), sequential(L.Dense(7, "relu", name="up"), L.Dense(5, name="down"), shape=(3,))]
        self.norm = L.LayerNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(self.blocks[1](self.blocks[0](x)))


def called() -> Any:
    model = Subclassed()
    model(values(2, 5))
    return filled(model)


def nested() -> Any:
    given = keras.Input((5,))
    block = keras.Sequential([keras.Input((5,)), L.Dense(7, "relu", name="up"), L.Dense(5, name="down")], name="block")
    return filled(keras.Model(given, block(L.Add()([given, block(given)]))))


MODELS = {
    "sequential": (plain, PLAN),
    "subclassed": (called, {"*/up": Column(), "*/down": Row()}),
    "nested and shared": (nested, {"block/up": Column(), "block/down": Row()}),
    "regularized": (lambda: plain(kernel_regularizer="l2"), PLAN),
}


def train(model: Any, optimizer: Any, **options: Any) -> Any:
    model.compile(optimizer=optimizer, loss="mse", **options)
    x, width = values(12, 5), model(values(1, 5)).shape[-1]
    return model.fit(x, values(12, width, seed=1), batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fit(comm: Any, kind: str, optimizer: str) -> None:
    make, plan = MODELS[kind]
    whole, own = make(), make()
    assert parallelize(own, comm, plan) is own
    expected, variables = alone(comm, lambda: (train(whole, optimizer), [one.numpy() for one in whole.variables]))
    losses = train(own, optimizer)
    if kind != "regularized" or comm.size == 1:
        near(losses, expected)
    for one, other in zip(own.variables, variables, strict=True):
        near_shard(one, other, one, 1e-9)
    assert len(list(shards_in(own))) >= 3
    own.summary(print_fn=lambda *_, **__: None)


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": "auto"}])
def test_ways_to_run(comm: Any, options: Any) -> None:
    whole, own = plain(), plain()
    parallelize(own, comm, PLAN)
    near(
        train(own, keras.optimizers.SGD(0.1, momentum=0.9), **options),
        train(whole, keras.optimizers.SGD(0.1, momentum=0.9)),
    )
    near(own.predict(values(4, 5), verbose=0), whole.predict(values(4, 5), verbose=0))


def test_compiled_and_run_before(comm: Any) -> None:
    """Traces of the plain model are discarded."""
    whole, own = plain(), plain()
    for model in (whole, own):
        model.compile(optimizer="adam", loss="mse")
        model.predict(values(4, 5), verbose=0)
    parallelize(own, comm, PLAN)
    x, y = values(6, 5), values(6, 3)
    near(own.predict(x, verbose=0), whole.predict(x, verbose=0))
    near(own.fit(x, y, verbose=0).history["loss"], whole.fit(x, y, verbose=0).history["loss"])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(comm: Any, policy: str) -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    low = {"mixed_bfloat16": 2e-2, "mixed_float16": 3e-3}[policy]
    own = same(plain, PLAN, comm, values(4, 5).astype(np.float32), tolerance=low)
    assert {v.dtype for v in own.variables} == {"float32"}
    assert own(values(4, 5)).dtype == policy.removeprefix("mixed_")
    same(
        lambda: sequential(
            L.LayerNormalization(name="n"), L.Dense(5, name="up"), L.Dense(5, name="down"), shape=(4, 5)
        ),
        {"n": Sequence(), "up": Column(sequence=1), "down": Row(sequence=1)},
        comm,
        values(2, 4, 5).astype(np.float32),
        sequence=1,
        tolerance=2 * low,
    )


def test_a_codec(comm: Any) -> None:
    whole, own = plain(), plain()
    parallelize(own, comm, PLAN, codec="bf16")
    x, expected = values(4, 5), whole(values(4, 5))
    near(own(x), expected, 2e-2)
    if comm.size > 1:
        assert np.any(np.asarray(own(x)) != np.asarray(expected))


def test_a_whole_layer_into_divided_ones(comm: Any) -> None:
    """Each rank uses a whole bias for its own units: its gradient is the sum."""

    class Shifted(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.shift = L.Dense(8, name="up"), L.Dense(3, name="down"), L.Dense(1, name="shift")

        def call(self, x: Any) -> Any:
            return self.down(tf.tanh(self.up(x) + self.shift(x)))

    def make() -> Any:
        model = Shifted()
        model(values(2, 5))
        return filled(model)

    same(make, {**PLAN, "shift": Replicate(into_sharded=True)}, comm, values(4, 5))


class OneHead(keras.layers.Layer):  # type: ignore[misc]
    """Attention with one head of keys and values, repeated for the heads of queries, or `count` times."""

    def __init__(self, how: str, count: int = 0) -> None:
        super().__init__()
        self.how, self.count = how, count

    def call(self, q: Any, k: Any) -> Any:
        q, k = (keras.ops.reshape(one, (*keras.ops.shape(one)[:2], -1, 3)) for one in (q, k))
        count = self.count or q.shape[2]
        if self.how == "repeat":
            k = keras.ops.repeat(k, count, 2)
        elif self.how == "tile":
            k = keras.ops.tile(k, (1, 1, count, 1))
        else:
            k = keras.ops.broadcast_to(k, (*k.shape[:2], count, 3))
        result = keras.ops.einsum("bhqk,bkhd->bqhd", keras.ops.softmax(keras.ops.einsum("bqhd,bkhd->bhqk", q, k)), k)
        return keras.ops.reshape(result, (*keras.ops.shape(result)[:2], -1))

    def compute_output_shape(self, q_shape: Any, k_shape: Any) -> Any:
        return q_shape


def with_one_head(how: str, count: int = 0) -> Any:
    given = keras.Input(batch_shape=(2, 5, 4))
    q, k = L.Dense(12, name="q")(given), L.Dense(3, name="k")(given)
    return filled(keras.Model(given, L.Dense(4, name="o")(OneHead(how, count)(q, k))))


ONE_HEAD: Any = {"q": Column(units=4), "k": Replicate(into_sharded=True), "o": Row(units=4)}


@pytest.mark.parametrize("how", ["repeat", "tile", "broadcast"])
def test_one_repeated_head(comm: Any, how: str) -> None:
    """Regression: it was refused, because the repeated head had the length of the whole dimension."""
    same(lambda: with_one_head(how), ONE_HEAD, comm, values(2, 5, 4))


@pytest.mark.ranks(min=2, max=4)
def test_one_head_repeated_by_the_whole_number(comm: Any) -> None:
    """A number that belongs to the whole does not fit a rank."""
    with pytest.raises(UsageError, match="one_head"):
        parallelize(with_one_head("repeat", 4), comm, ONE_HEAD)


def test_layers_constructed_divided(comm: Any) -> None:
    """They have rank 0's values; shapes inferred by Keras are those of the whole."""
    keras.utils.set_random_seed(comm.rank)
    given = keras.Input((5,))
    up = ColumnDense(7, comm, activation="relu", name="up")
    model = keras.Model(given, RowDense(3, comm, name="down")(L.Dropout(0.0)(up(given))))
    x = values(4, 5)
    near(comm.broadcast(model(x).numpy()), model(x))
    assert up.output.shape == (None, 7)
    assert sum(comm.all_gather_object(up.kernel.shape[1])) == 7
    layer = RowDense(3, comm, features=7)
    layer(up(tf.constant(x)))
    assert sum(comm.all_gather_object(layer.kernel.shape[0])) == 7


def test_layers_built_while_a_function_is_traced(comm: Any) -> None:
    layer = ColumnDense(7, comm)
    with pytest.raises(UsageError, match="call the model once"):
        tf.function(layer, autograph=False)(values(4, 5))


def test_names_that_differ_between_ranks(comm: Any) -> None:
    """Keras counts the layers of a process: dense_3 here may be dense_4 there."""
    for _ in range(comm.rank):
        L.Dense(1)
    model = sequential(L.Dense(7), L.Dense(5), shape=(5,))
    parallelize(model, comm, {model.layers[0].name: Column(), model.layers[1].name: Row()})


@pytest.mark.ranks(min=2)
def test_ranks_with_different_plans_or_models_are_refused(comm: Any) -> None:
    plan = PLAN if comm.rank else {"up": Column(gather=True)}
    with pytest.raises(MismatchError, match="parallelize"):
        parallelize(plain(), comm, plan)
    model = sequential(L.Dense(7 + comm.rank, name="up"), shape=(5,))
    with pytest.raises(MismatchError, match="parallelize"):
        parallelize(model, comm, {"up": Column(gather=True)})


def test_invalid_arguments_are_refused(comm: Any) -> None:
    def refused(model: Any, match: str, plan: Any = None) -> None:
        with pytest.raises(UsageError, match=match):
            parallelize(model, comm, plan or PLAN)

    compiled = plain()
    compiled.compile(optimizer="sgd", loss="mse", jit_compile=True)
    refused(compiled, "jit_compile=True")
    refused(L.Dense(3), "expected a keras.Model, got keras.Dense")
    refused(keras.Sequential([L.Dense(7, name="up"), L.Dense(3, name="down")]), "no layer is called|not built")
    refused(plain(), "no layer is called 'middle'", {"middle": Column()})
    if comm.size > 1:
        refused(plain(kernel_constraint="max_norm"), "down/kernel has a constraint, MaxNorm, .* shard of dimension 0")
    twice = Subclassed()
    twice.blocks = [L.Dense(5, name="up"), L.Dense(5, name="up")]
    refused(twice, "2 layers are called up", {"up": Column()})
    divided = plain()
    parallelize(divided, comm, PLAN)
    refused(divided, "is sharded already")
    with pytest.raises(UsageError, match="jit_compile=True"):
        divided.compile(optimizer="sgd", loss="mse", jit_compile=True)


class Steps(keras.Model):  # type: ignore[misc]
    """A divided block that is called by constructs of TensorFlow and Keras."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.up, self.down = L.Dense(7, "tanh", name="up"), L.Dense(5, name="down")
        self.way, self.is_on = way, False

    def block(self, x: Any) -> Any:
        return self.down(self.up(x))

    def call(self, x: Any) -> Any:
        return self.way(self.block, x) if self.is_on else self.block(x)


STEPS = {
    "map": lambda block, x: keras.ops.map(block, x),
    "loop": lambda block, x: keras.ops.fori_loop(0, 2, lambda _, y: block(y), x),
    "branch": lambda block, x: tf.cond(tf.reduce_sum(x) > -1e9, lambda: block(x), lambda: x) + block(2 * x),
    "function": lambda block, x: tf.function(block)(x) + block(2 * x),
    "recomputed": lambda block, x: tf.recompute_grad(block)(x),
}


@pytest.mark.parametrize("way", STEPS)
def test_loops_branches_and_functions(comm: Any, way: str) -> None:
    """Regression: communication in a loop, a branch or a nested function was not ordered with its surroundings."""

    def make() -> Any:
        model = Steps(STEPS[way])
        model(values(2, 3, 5))
        model.is_on = True
        return filled(model)

    same(make, PLAN, comm, values(2, 3, 5))


@pytest.mark.ranks(min=2)
def test_a_vectorized_map_is_refused(comm: Any) -> None:
    """TensorFlow drops gradients of unknown operations there; TimeDistributed uses it for unknown numbers of steps."""
    block = keras.Sequential([keras.Input((5,)), L.Dense(7, name="up"), L.Dense(5, name="down")], name="block")
    model = keras.Sequential([keras.Input((None, 5)), L.TimeDistributed(block, name="steps")])
    parallelize(model, comm, {"steps/block/up": Column(), "steps/block/down": Row()})
    with pytest.raises(UsageError, match=r"tf\.vectorized_map"):
        tf.function(model, input_signature=[tf.TensorSpec((None, None, 5), tf.float64)], autograph=False)(
            values(2, 3, 5)
        )


@pytest.mark.ranks(min=2)
def test_operations_by_name_and_experts_in_a_vectorized_map_are_refused(comm: Any) -> None:
    """Regression: their gradients silently vanished there, like those of moves."""
    mixture = MoE(Experts(comm.size, top_k=1, hidden=4), comm, name="mixture")
    mixture(values(2, 3, 5))
    given = tf.constant(values(2, 3, 5))
    for inside in (hvd.allreduce, lambda x: hvd.grouped_allgather([x])[0], lambda x: mixture(x[None])[0]):
        with pytest.raises(UsageError, match=r"tf\.vectorized_map"):
            tf.vectorized_map(inside, given)


def test_time_distributed(comm: Any) -> None:
    def make() -> Any:
        layers = keras.Input((5,)), L.Dense(7, "relu", name="up"), L.Dense(5, name="down")
        return sequential(L.TimeDistributed(keras.Sequential(layers, name="block"), name="steps"), shape=(3, 5))

    same(make, {"steps/block/up": Column(), "steps/block/down": Row()}, comm, values(2, 3, 5))
    wrapped = sequential(L.TimeDistributed(L.Dense(7, name="up"), name="steps"), shape=(3, 5))
    with pytest.raises(UsageError, match=r"put the layer into a keras\.Sequential"):
        parallelize(wrapped, comm, {"steps/up": Column(gather=True)})
    normalised = sequential(L.SpectralNormalization(L.Dense(7, name="up"), name="norm"), shape=(5,))
    with pytest.raises(UsageError, match="this rank's shard of the weight"):
        parallelize(normalised, comm, {"norm/up": Column(gather=True)})


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "between",
    [
        L.DepthwiseConv1D(2, name="mix"),
        L.SeparableConv1D(4, 2, name="mix"),
        L.Conv1DTranspose(8, 2, name="mix"),
        L.LSTM(8, return_sequences=True, name="mix"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_use_all_channels_are_refused(comm: Any, between: Any) -> None:
    """Regression: the model was divided first, and then failed with a Keras error."""
    model = sequential(L.Conv1D(8, 2, name="up"), between, L.Conv1D(3, 1, name="down"), shape=(5, 4))
    with pytest.raises(UsageError, match=r"plan: mix .*takes all features.*sharded along dimension 2 \(by up\)"):
        parallelize(model, comm, PLAN)
    assert not list(shards_in(model))


def test_a_layer_that_counts(comm: Any) -> None:
    """Regression: Normalization's count of rows is a scalar variable, which was read-only."""
    first = L.Normalization()
    first.adapt(values(10, 5))
    model = sequential(first, L.Dense(7, name="up"), L.Dense(3, name="down"), shape=(5,))
    expected = model(values(2, 5))
    near(parallelize(model, comm, PLAN)(values(2, 5)), expected)


def test_models_of_keras_2(comm: Any) -> None:
    legacy = pytest.importorskip("tf_keras")
    with pytest.raises(UsageError, match="use Keras 3"):
        parallelize(legacy.Sequential([legacy.layers.Dense(3)]), comm, PLAN)
    with pytest.raises(UsageError, match=r"keras\.Sequential: models of Keras 2"):
        gather_model(legacy.Sequential([legacy.layers.Dense(3)]))


@pytest.mark.ranks(min=2)
def test_an_undivided_input_is_refused(comm: Any) -> None:
    model = plain()
    with pytest.raises(UsageError, match=r"its input is unsharded: give it split=True"):
        parallelize(model, comm, {"down": Row()})
