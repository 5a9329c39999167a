"""Experts like an MLP have its regularizers, constraints and dtypes, and what they cannot have is refused by name."""

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
from commlib_tensorflow import DistributedGradientTape, DistributedOptimizer, clip_by_global_norm, gather_weights
from commlib_tensorflow.expert import MoE, expertize

L = keras.layers
WIDTH = 4


def dense(*layers: Any, **settings: Any) -> Any:
    """Return a model x + mlp(x), whose MLP has a first layer of some settings, and others behind it."""
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
    """The norm of a weight: that of a stack is not the sum of those of its weights."""

    def __call__(self, weight: Any) -> Any:
        return 0.5 * keras.ops.sqrt(keras.ops.sum(weight**2))

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("copies", [False, pytest.param(True, marks=pytest.mark.long)])
def test_regularizers_and_constraints_are_of_each_expert(comm: Communicator, copies: bool) -> None:
    """They were left out: a model trained on without its weight decay."""
    if comm.size == 3 and copies:
        pytest.skip("2 ranks for copies")
    settings = {
        "kernel_regularizer": Roots(),
        "bias_regularizer": "l2",
        "kernel_constraint": keras.constraints.UnitNorm(axis=0),
    }
    mesh = Mesh(dp=-1).refactor({"dp": {"edp": -1, "ep": 1 if copies else comm.size}})
    made = expertize(dense(**settings), mesh, plan(comm))
    for stack in made.get_layer("mlp").stacks[1::2]:  # biases
        stack.assign_add(tf.ones_like(stack))
    kernels, biases = gather_weights(made)[1:3]
    made.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh), loss=lambda y, out: 0.0 * out)
    losses = made.fit(rows(comm), rows(comm), batch_size=4, verbose=0).history["loss"]
    norms = np.sqrt((kernels.astype(np.float64) ** 2).sum((1, 2)))
    expected = 0.5 * norms.sum() + 0.01 * (biases**2).sum()
    np.testing.assert_allclose(comm.all_reduce(np.array(losses), "mean"), expected, rtol=1e-6)
    stepped = kernels - 0.1 * 0.5 * kernels / norms[:, None, None]
    stepped /= np.sqrt((stepped**2).sum(1, keepdims=True))
    after = gather_weights(made)
    np.testing.assert_allclose(after[1], stepped, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[2], biases - 0.1 * 0.02 * biases, rtol=1e-6)
    mesh.close()


def test_each_weight_has_the_dtype_that_it_had(comm: Communicator) -> None:
    """Those of a layer in float64 were rounded to float32."""
    plain = dense(dtype="float64")
    x = rows(comm)
    expected = plain(x).numpy()
    values = plain.get_layer("mlp").layers[0].kernel.numpy()
    made = expertize(plain, comm, plan(comm, copy=True))
    first, _, last, _ = made.get_layer("mlp").stacks
    assert (first.dtype, last.dtype) == ("float64", "float32")
    np.testing.assert_array_equal(first[0], values)
    np.testing.assert_allclose(made(x), expected, rtol=1e-6, atol=1e-6)


def test_an_mlp_of_another_dtype_than_its_container(comm: Communicator) -> None:
    """It was refused, as experts were tried with rows of the container's dtype, which casts nothing."""
    keras.utils.set_random_seed(3)
    mlp = keras.Sequential([L.Dense(6, "gelu", dtype="float64"), L.Dense(WIDTH, dtype="float64")], name="mlp")
    given = keras.Input((3, WIDTH), dtype="float64")
    plain = keras.Model(given, mlp(given))
    x = rows(comm).astype(np.float64)
    expected = plain(x).numpy()
    made = expertize(plain, comm, plan(comm, copy=True))
    assert made(x).dtype == "float64"
    np.testing.assert_allclose(made(x), expected, rtol=1e-6, atol=1e-6)


class Doubles(keras.layers.Layer):  # type: ignore[misc]
    """An MLP that does something else in training."""

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
    """A layer whose loss is of what it is given."""

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.sum(x))
        return x


def test_experts_are_told_whether_they_are_trained(comm: Communicator) -> None:
    """They computed as in evaluation."""
    x = keras.Input((3, WIDTH))
    made = expertize(keras.Model(x, Doubles(name="mlp")(x)), comm, plan(comm))
    given = rows(comm)
    np.testing.assert_allclose(made(given, training=True), 2 * made(given), rtol=1e-6)


def test_a_layer_without_weights_may_be_frozen(comm: Communicator) -> None:
    """One that was, with all others, and not thawed with them."""
    made = dense(L.Activation("gelu", trainable=False))
    expertize(made, comm, plan(comm))
    assert isinstance(made.get_layer("mlp"), MoE)


def test_a_seed_of_an_initializer_does_not_make_experts_alike(comm: Communicator) -> None:
    """All experts began with the same values, and stayed so."""
    made = expertize(dense(kernel_initializer=keras.initializers.GlorotUniform(seed=5)), comm, plan(comm))
    kernels = gather_weights(made)[1]
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


def test_what_experts_cannot_have_is_refused_by_name(comm: Communicator) -> None:
    """A frozen MLP was said to be none, and losses of activities were left out. The model is as it was."""
    for name, (made, message) in refused().items():
        layers = [type(layer) for layer in made.layers]
        expected = made(rows(comm)).numpy()
        with pytest.raises(UsageError, match=message):
            expertize(made, comm, plan(comm, copy=True))
        assert [type(layer) for layer in made.layers] == layers, name
        np.testing.assert_array_equal(made(rows(comm)), expected, err_msg=name)
    with pytest.raises(UsageError, match=r"expertize: expected a keras.Model, got builtins.list"):
        expertize([], comm, plan(comm))
    made = dense(kernel_regularizer="l2")
    with pytest.raises(
        UsageError, match=r"kernel has a regularizer, which built-in experts \(hidden=\) do not support"
    ):
        expertize(made, comm, plan(comm, hidden=3))
    with pytest.raises(UsageError, match=r"for rows float32\[number, 4\] an expert returns float32\[number, 5\]"):
        MoE(Experts(2 * comm.size), comm, expert=lambda: L.Dense(5))(rows(comm))


class Scaled(Doubles):
    """An MLP with an attribute that its configuration does not tell."""

    scale = 1.0

    def call(self, x: Any, training: Any = False) -> Any:
        return self.scale * super().call(x, training=training)


def test_what_is_not_of_each_token_is_refused(comm: Communicator) -> None:
    """Copies began as something else than the model, in silence; PReLU raised an error of Keras."""
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
        for name, (made, message) in cases.items():
            with pytest.raises(UsageError, match=message):
                expertize(made, comm, plan(comm, copy=copies))
            assert not isinstance(made.get_layer("mlp"), MoE), name


def test_mlps_within_mlps_and_functional_ones(comm: Communicator) -> None:
    """They were refused, since they had been built for sequences."""
    x = keras.Input((None, WIDTH))
    within = keras.Sequential([keras.Sequential([L.Dense(6, "relu")]), L.Dense(WIDTH)], name="mlp")
    for mlp in (keras.Model(x, L.Dense(WIDTH)(L.Dense(6, "relu")(x)), name="mlp"), within):
        given = keras.Input((3, WIDTH))
        model = keras.Model(given, given + mlp(given))
        expected = model(rows(comm)).numpy()
        made = expertize(model, comm, plan(comm, copy=True))
        np.testing.assert_allclose(made(rows(comm)), expected, rtol=1e-5, atol=1e-6)


def test_a_scope_of_keras_leaves_experts_their_gradients(comm: Communicator) -> None:
    """In a RematScope weights of experts had none, as TensorFlow computed with others again."""
    found = []
    for mode in (None, "full"):
        with keras.RematScope(mode):
            made = expertize(dense(), comm, plan(comm))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(rows(comm), training=True) ** 2)
        found.append(tape.gradient(loss, [stack.value for stack in made.get_layer("mlp").stacks]))
    for expected, got in zip(*found, strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with keras.RematScope("full"):
        layer = L.Dense(WIDTH)
    with pytest.raises(UsageError, match=r"was made in a keras.RematScope, in which experts' gradients would be lost"):
        MoE(Experts(comm.size), comm, expert=lambda: layer)(rows(comm))


def test_models_with_experts_are_not_exported(comm: Communicator, tmp_path: Path) -> None:
    """They were, without a word, and could not be served. Files of weights named what refuses experts."""
    made = expertize(dense(), comm, plan(comm))
    for export in (made.export, lambda path: tf.saved_model.save(made, path)):
        with pytest.raises(UsageError, match=r"mlp: .* cannot be exported.*gather_weights\(model\).*save_experts"):
            export(str(tmp_path / "served"))
    if comm.size > 1:
        with pytest.raises(
            UsageError, match=r"it has experts: save the result of gather_weights\(model\) .*or use save_experts"
        ):
            made.save_weights(tmp_path / "one.weights.h5")


def test_norms_of_all_experts(comm: Communicator) -> None:
    """Each rank clipped by a norm of its own experts, without `variables`, and ranks parted."""
    made = expertize(dense(), comm, plan(comm))
    for run in (lambda step: step, tf.function):

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(made(rows(comm), training=True) ** 2)
            weights = made.trainable_variables
            gradients = DistributedGradientTape(tape).gradient(loss, weights)
            return gradients, *clip_by_global_norm(gradients, 0.1)

        gradients, clipped, norm = run(step)()
        squares = [float(tf.reduce_sum(one**2)) for one in gradients]
        stacks = set(map(id, made.get_layer("mlp").stacks))
        own = sum(s for s, v in zip(squares, made.trainable_variables, strict=True) if id(v) in stacks)
        expected = np.sqrt(sum(squares) - own + comm.all_reduce(np.array(own)))
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
        np.testing.assert_allclose(clipped[-1], gradients[-1] * 0.1 / expected, rtol=1e-5)


@pytest.mark.ranks(min=2)
def test_frozen_on_one_rank(comm: Communicator) -> None:
    """Ranks were told of other variables, by their numbers."""
    made = expertize(dense(), comm, plan(comm))
    made.get_layer("mlp").trainable = comm.rank == 0
    with pytest.raises(MismatchError, match=r"MoE .*first used: .*'trainable: True' on rank 0 but 'trainable: False'"):
        made(rows(comm), training=True)


@pytest.mark.ranks(min=2)
def test_other_settings_on_ranks(comm: Communicator) -> None:
    """Ranks trained their experts with another weight decay each."""
    with pytest.raises(MismatchError, match=r"kernel_regularizer\.config\.l2=0\.1' on rank 0"):
        expertize(dense(kernel_regularizer=keras.regularizers.L2(0.1 + comm.rank)), comm, plan(comm))


def test_functions_as_activations_are_told_by_what_they_do(comm: Communicator) -> None:
    """Their addresses, which differ on ranks, were compared; a class was called with tokens."""
    for activation in (tf.nn.silu, lambda x: tf.sin(x)):
        model = expertize(dense(), comm, plan(comm, hidden=3, activation=activation))
        assert model(rows(comm)).shape == (4, 3, WIDTH)
    with pytest.raises(UsageError, match=r"activation is the class ReLU, expected .*ReLU\(\)"):
        plan(comm, hidden=3, activation=L.ReLU)


def test_ranks_that_differ_are_told_in_what(comm: Communicator) -> None:
    """Copies were made of other values on each rank; of options that differed all were shown."""
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
    expertize(model, comm, plan(comm))  # they all get new ones
