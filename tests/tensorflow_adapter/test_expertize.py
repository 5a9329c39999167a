"""Experts get regularizers, constraints and dtypes of their MLP; unsupported settings are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator, Mesh
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow import (
    Column,
    DistributedGradientTape,
    DistributedOptimizer,
    clip_by_global_norm,
    gather_weights,
    parallelize,
)
from commlib_tensorflow.expert import MoE, expertize

L = keras.layers
WIDTH = 4


def dense(*layers: Any, **settings: Any) -> Any:
    """Return a model x + mlp(x) with settings for the MLP's first layer, and with more layers behind it."""
    keras.utils.set_random_seed(3)
    x = keras.Input((3, WIDTH))
    last = L.Dense(WIDTH, name="last")
    mlp = keras.Sequential([keras.Input((3, WIDTH)), L.Dense(6, name="first", **settings), *layers, last], name="mlp")
    return keras.Model(x, x + mlp(x))


def rows(comm: Communicator) -> Any:
    return np.random.default_rng(comm.rank).normal(size=(4, 3, WIDTH)).astype(np.float32)


def plan(comm: Communicator, **options: Any) -> dict[str, Experts]:
    return {"mlp": Experts(2 * comm.size, top_k=2, balance="none", **options)}


@keras.saving.register_keras_serializable("tests")
class Roots(keras.regularizers.Regularizer):  # type: ignore[misc]
    """The norm of a weight; the norm of a stack is not the sum of the norms of its weights."""

    def __call__(self, weight: Any) -> Any:
        return 0.5 * keras.ops.sqrt(keras.ops.sum(weight**2))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("copies", [False, True])
def test_each_expert_has_regularizers_and_constraints(comm: Communicator, copies: bool) -> None:
    """Regression: they were dropped, so that training continued without weight decay."""
    if comm.size == 3 and copies:
        pytest.skip("2 ranks for copies")
    settings = {
        "kernel_regularizer": Roots(),
        "bias_regularizer": "l2",
        "kernel_constraint": keras.constraints.UnitNorm(axis=0),
    }
    mesh = Mesh(dp=-1).refactor({"dp": {"edp": -1, "ep": 1 if copies else comm.size}})
    model = expertize(dense(**settings), mesh, plan(comm))
    for stack in model.get_layer("mlp").stacks[1::2]:  # biases
        stack.assign_add(tf.ones_like(stack))
    kernels, biases = gather_weights(model)[1:3]
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh), loss=lambda y, out: 0.0 * out)
    losses = model.fit(rows(comm), rows(comm), batch_size=4, verbose=0).history["loss"]
    norms = np.sqrt((kernels.astype(np.float64) ** 2).sum((1, 2)))
    expected = 0.5 * norms.sum() + 0.01 * (biases**2).sum()
    np.testing.assert_allclose(comm.all_reduce(np.array(losses), "mean"), expected, rtol=1e-6)
    stepped = kernels - 0.1 * 0.5 * kernels / norms[:, None, None]
    stepped /= np.sqrt((stepped**2).sum(1, keepdims=True))
    after = gather_weights(model)
    np.testing.assert_allclose(after[1], stepped, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[2], biases - 0.1 * 0.02 * biases, rtol=1e-6)
    mesh.close()


def test_each_weight_keeps_its_dtype(comm: Communicator) -> None:
    """Regression: weights of a float64 layer were rounded to float32."""
    plain = dense(dtype="float64")
    x = rows(comm)
    expected = plain(x).numpy()
    values = plain.get_layer("mlp").layers[0].kernel.numpy()
    model = expertize(plain, comm, plan(comm, copy=True))
    first, _, last, _ = model.get_layer("mlp").stacks
    assert (first.dtype, last.dtype) == ("float64", "float32")
    np.testing.assert_array_equal(first[0], values)
    np.testing.assert_allclose(model(x), expected, rtol=1e-6, atol=1e-6)


def test_an_mlp_of_another_dtype_than_its_container(comm: Communicator) -> None:
    """Regression: it was refused, because experts were tried with rows of the container's dtype."""
    keras.utils.set_random_seed(3)
    mlp = keras.Sequential([L.Dense(6, "gelu", dtype="float64"), L.Dense(WIDTH, dtype="float64")], name="mlp")
    given = keras.Input((3, WIDTH), dtype="float64")
    plain = keras.Model(given, mlp(given))
    x = rows(comm).astype(np.float64)
    expected = plain(x).numpy()
    model = expertize(plain, comm, plan(comm, copy=True))
    assert model(x).dtype == "float64"
    np.testing.assert_allclose(model(x), expected, rtol=1e-6, atol=1e-6)


class Doubles(keras.layers.Layer):  # type: ignore[misc]
    """An MLP that computes something else in training."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.up = L.Dense(6)
        self.down = L.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], 6))

    def call(self, x: Any, training: Any = False) -> Any:
        return self.down(self.up(x)) * (2.0 if training else 1.0)


class AddsLosses(keras.layers.Layer):  # type: ignore[misc]
    """A layer whose loss depends on its input."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.sum(x))
        return x


def test_experts_receive_the_training_flag(comm: Communicator) -> None:
    """Regression: they always computed as in evaluation."""
    x = keras.Input((3, WIDTH))
    model = expertize(keras.Model(x, Doubles(name="mlp")(x)), comm, plan(comm))
    given = rows(comm)
    np.testing.assert_allclose(model(given, training=True), 2 * model(given), rtol=1e-6)


def test_a_layer_without_weights_may_be_frozen(comm: Communicator) -> None:
    """Regression: freezing and unfreezing the whole model left it frozen."""
    model = dense(L.Activation("gelu", trainable=False))
    expertize(model, comm, plan(comm))
    assert isinstance(model.get_layer("mlp"), MoE)


def test_a_seeded_initializer_makes_different_experts(comm: Communicator) -> None:
    """Regression: all experts began with equal values, and stayed equal."""
    model = expertize(dense(kernel_initializer=keras.initializers.GlorotUniform(seed=5)), comm, plan(comm))
    kernels = gather_weights(model)[1]
    assert len({kernel.tobytes() for kernel in kernels}) == 2 * comm.size


def refused() -> dict[str, tuple[Any, str]]:
    frozen = dense()
    frozen.get_layer("mlp").trainable = False
    part = dense()
    part.get_layer("mlp").layers[0].trainable = False
    lora = dense()
    lora.get_layer("mlp").layers[0].enable_lora(2)
    in_64 = dense()
    in_64.get_layer("mlp").layers[-1].dtype_policy = keras.DTypePolicy("float64")
    return {
        "frozen": (frozen, r"first is frozen \(trainable=False\).*freeze the mixture of experts afterwards"),
        "a frozen layer": (part, r"first is frozen \(trainable=False\)"),
        "LoRA": (lora, r"first has LoRA.*use merged kernels"),
        "activity": (dense(activity_regularizer="l2"), "first has an activity regularizer.*after the mixture"),
        "add_loss": (dense(AddsLosses()), "calls add_loss.*after the mixture"),
        "dropout": (dense(L.Dropout(0.1, name="drop")), r"drop \(Dropout\) draws random numbers"),
        "batch norm": (dense(L.BatchNormalization()), "moving_mean, which is not trained"),
        "another dtype": (in_64, r"for rows float32\[number, 4\] an expert returns float64\[number, 4\]"),
    }


def test_unsupported_settings_are_refused_by_name(comm: Communicator) -> None:
    """Regression: a frozen MLP was not recognised, and activity losses were dropped. The model is unchanged."""
    for name, (model, message) in refused().items():
        layers = [type(layer) for layer in model.layers]
        expected = model(rows(comm)).numpy()
        with pytest.raises(UsageError, match=message):
            expertize(model, comm, plan(comm, copy=True))
        assert [type(layer) for layer in model.layers] == layers, name
        np.testing.assert_array_equal(model(rows(comm)), expected, err_msg=name)
    with pytest.raises(UsageError, match=r"expertize: expected a keras.Model, got builtins.list"):
        expertize([], comm, plan(comm))
    with pytest.raises(UsageError, match=r"mlp: activation='gleu' is for built-in MLPs.*pass hidden= too"):
        expertize(dense(), comm, plan(comm, activation="gleu"))
    with pytest.raises(UsageError, match=r"activation 'silo', expected a function, or a name .*did you mean 'silu'\?"):
        expertize(dense(), comm, plan(comm, hidden=3, activation="silo"))
    with pytest.raises(UsageError, match="mix: hidden=3 is for built-in MLPs, but expert= makes other experts"):
        MoE(Experts(2 * comm.size, hidden=3), comm, expert=lambda: L.Dense(4), name="mix")
    model = dense(kernel_regularizer="l2")
    with pytest.raises(
        UsageError, match=r"kernel has a regularizer, which built-in experts \(hidden=\) do not support"
    ):
        expertize(model, comm, plan(comm, hidden=3))
    with pytest.raises(UsageError, match=r"for rows float32\[number, 4\] an expert returns float32\[number, 5\]"):
        MoE(Experts(2 * comm.size), comm, expert=lambda: L.Dense(5))(rows(comm))


@pytest.mark.ranks(min=2)
def test_sharded_mlps_are_refused(comm: Communicator) -> None:
    """Regression: the error named shapes, and not the reason."""
    model = dense()
    parallelize(model, comm, {"mlp/first": Column(gather=True)})
    with pytest.raises(UsageError, match=r"mlp: .*first/kernel is sharded already.*expertize before parallelize"):
        expertize(model, comm, plan(comm))


class Scaled(Doubles):
    """An MLP with an attribute that its configuration omits."""

    scale = 1.0

    def call(self, x: Any, training: Any = False) -> Any:
        return self.scale * super().call(x, training=training)


def test_layers_that_mix_tokens_are_refused(comm: Communicator) -> None:
    """Regression: copies silently differed from the model; PReLU raised a Keras error."""
    x = keras.Input((3, WIDTH))
    scaled = keras.Model(x, Scaled(name="mlp")(x))
    scaled.get_layer("mlp").scale = 5.0
    cases = {
        "groups": (dense(L.GroupNormalization(2)), "mixes tokens, or has state that its configuration"),
        "an axis": (dense(L.UnitNormalization(axis=1)), "mixes tokens"),
        "a softmax": (dense(L.Softmax(axis=1)), "mixes tokens"),
        "an attribute": (scaled, "mixes tokens, or has state that its configuration lacks"),
        "places": (
            dense(L.PReLU(name="prelu")),
            r"prelu/alpha has shape \[3, 6\], but in an expert.*\[6\]: give hidden=",
        ),
        "shared": (dense(L.PReLU(shared_axes=[1], name="prelu")), r"prelu/alpha has shape \[1, 6\].*\[1\]"),
    }
    for copies in (True, False):
        for name, (model, message) in cases.items():
            with pytest.raises(UsageError, match=message):
                expertize(model, comm, plan(comm, copy=copies))
            assert not isinstance(model.get_layer("mlp"), MoE), name


def test_nested_and_functional_mlps(comm: Communicator) -> None:
    """Regression: they were refused, since they had been built for sequences."""
    x = keras.Input((None, WIDTH))
    within = keras.Sequential([keras.Sequential([L.Dense(6, "relu")]), L.Dense(WIDTH)], name="mlp")
    for mlp in (keras.Model(x, L.Dense(WIDTH)(L.Dense(6, "relu")(x)), name="mlp"), within):
        given = keras.Input((3, WIDTH))
        model = keras.Model(given, given + mlp(given))
        expected = model(rows(comm)).numpy()
        built = expertize(model, comm, plan(comm, copy=True))
        np.testing.assert_allclose(built(rows(comm)), expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_experts_survive_a_scope_of_keras(comm: Communicator) -> None:
    """Regression: in a RematScope experts' weights had none, as TensorFlow recomputed with different ones."""
    results = []
    for mode in (None, "full"):
        with keras.RematScope(mode):
            model = expertize(dense(), comm, plan(comm))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows(comm), training=True) ** 2)
        results.append(tape.gradient(loss, [stack.value for stack in model.get_layer("mlp").stacks]))
    for expected, got in zip(*results, strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with keras.RematScope("full"):
        layer = L.Dense(WIDTH)
    with pytest.raises(UsageError, match=r"was made in a keras.RematScope, in which experts' gradients would be lost"):
        MoE(Experts(comm.size), comm, expert=lambda: layer)(rows(comm))


def test_models_with_experts_are_not_exported(comm: Communicator, tmp_path: Path) -> None:
    """Regression: they were silently exported, and could not be served. Files of weights named the obstacle."""
    model = expertize(dense(), comm, plan(comm))
    for export in (model.export, lambda path: tf.saved_model.save(model, path)):
        with pytest.raises(UsageError, match=r"mlp: .* cannot be exported.*gather_weights\(model\).*save_experts"):
            export(str(tmp_path / "served"))
    if comm.size > 1:
        with pytest.raises(
            UsageError, match=r"it has experts: save the result of gather_weights\(model\) .*or use save_experts"
        ):
            model.save_weights(tmp_path / "one.weights.h5")


def test_norms_include_all_experts(comm: Communicator) -> None:
    """Regression: without `variables` each rank clipped by the norm of its own experts, and ranks diverged."""
    model = expertize(dense(), comm, plan(comm))
    for run in (lambda step: step, tf.function):

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(rows(comm), training=True) ** 2)
            weights = model.trainable_variables
            gradients = DistributedGradientTape(tape).gradient(loss, weights)
            return gradients, *clip_by_global_norm(gradients, 0.1)

        gradients, clipped, norm = run(step)()
        squares = [float(tf.reduce_sum(one**2)) for one in gradients]
        stacks = set(map(id, model.get_layer("mlp").stacks))
        own = sum(s for s, v in zip(squares, model.trainable_variables, strict=True) if id(v) in stacks)
        expected = np.sqrt(sum(squares) - own + comm.all_reduce(np.array(own)))
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
        np.testing.assert_allclose(clipped[-1], gradients[-1] * 0.1 / expected, rtol=1e-5)


@pytest.mark.ranks(min=2)
def test_weights_frozen_on_one_rank_are_named(comm: Communicator) -> None:
    """Regression: the error gave only numbers of variables."""
    model = expertize(dense(), comm, plan(comm))
    model.get_layer("mlp").trainable = comm.rank == 0
    with pytest.raises(MismatchError, match=r"MoE .*first used: .*'trainable: True' on rank 0 but 'trainable: False'"):
        model(rows(comm), training=True)


@pytest.mark.ranks(min=2)
def test_different_settings_on_ranks_are_refused(comm: Communicator) -> None:
    """Regression: each rank trained its experts with its own weight decay."""
    with pytest.raises(MismatchError, match=r"kernel_regularizer\.config\.l2=0\.1' on rank 0"):
        expertize(dense(kernel_regularizer=keras.regularizers.L2(0.1 + comm.rank)), comm, plan(comm))


def test_functions_as_activations_are_compared_by_behaviour(comm: Communicator) -> None:
    """Regression: their addresses were compared, which differ on ranks; a class was called with tokens."""
    for activation in (tf.nn.silu, lambda x: tf.sin(x)):
        model = expertize(dense(), comm, plan(comm, hidden=3, activation=activation))
        assert model(rows(comm)).shape == (4, 3, WIDTH)
    with pytest.raises(UsageError, match=r"activation is the class ReLU, expected .*ReLU\(\)"):
        plan(comm, hidden=3, activation=L.ReLU)


def test_differences_between_ranks_are_named(comm: Communicator) -> None:
    """Regression: copies had different values on each rank, and all options were printed, not only different ones."""
    if comm.size == 1:
        return
    odd = comm.rank == 1
    with pytest.raises(MismatchError, match=r"'layer \d+: jitter=0.0' on rank 0 but 'layer \d+: jitter=0.1' on rank 1"):
        expertize(dense(), comm, plan(comm, jitter=0.1 * odd))
    model = dense()
    kernel = model.get_layer("mlp").layers[0].kernel
    kernel.assign(kernel + odd)
    with pytest.raises(MismatchError, match="values of weight 0 of layer"):
        expertize(model, comm, plan(comm, copy=True))
    expertize(model, comm, plan(comm))  # all experts are new
