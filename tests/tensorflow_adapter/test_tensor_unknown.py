"""Operations unknown to the rules were silently wrong, under "auto" and under own plans.

The oracle is one process: another model with the same weights.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import copy, parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, same, sequential, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"up": Column(), "down": Row()}
LINE = r"test_tensor_unknown\.py:\d+"


@tf.function
def of_sum(h: Any) -> Any:
    return h / tf.reduce_sum(tf.abs(h), -1, keepdims=True)


@tf.custom_gradient
def clips_gradient(h: Any) -> Any:
    return tf.identity(h), lambda g: tf.clip_by_norm(g, 0.001, axes=[-1])


@tf.custom_gradient
def turns_gradient(h: Any) -> Any:
    return tf.identity(h), lambda g: -g


WRONG: dict[str, Any] = {
    "a gradient": clips_gradient,
    "a gradient in a loop": lambda h: tf.map_fn(clips_gradient, h),
    "a gradient by keras": lambda h: ops.custom_gradient(lambda u: (u * 1, lambda g: g - ops.mean(g)))(h),
    "a function": of_sum,
    "map_fn": lambda h: tf.map_fn(of_sum, h),
    "a loop": lambda h: ops.fori_loop(0, 2, lambda _, x: x / tf.reduce_sum(tf.abs(x)), h),
    "a branch": lambda h: tf.cond(tf.reduce_all(h < 1e9), lambda: of_sum(h), lambda: h),
    "pooling": lambda h: ops.transpose(ops.max_pool(ops.transpose(h, (0, 2, 1)), 3, 1, "same"), (0, 2, 1)),
    "normalisation": lambda h: tf.cast(tf.nn.lrn(tf.cast(h[:, :, None], tf.float32))[:, :, 0], h.dtype),
    "fft": lambda h: tf.math.real(tf.signal.fft(tf.cast(h, tf.complex128))),
    "qr": lambda h: h + ops.qr(h)[0][..., :1],
    "a length": lambda h: h * h.shape[-1] ** -0.5,
    "a length of tensors": lambda h: h * tf.cast(tf.shape(h)[-1], h.dtype),
}
RIGHT: dict[str, Any] = {
    "a gradient": turns_gradient,
    "elementwise": lambda h: ops.celu(h) + tf.math.erf(h) + ops.logaddexp(h, h),
    "a function": tf.function(lambda h: tf.tanh(h) * 2),
    "map_fn": lambda h: tf.map_fn(tf.tanh, h),
    "a branch": lambda h: tf.cond(tf.constant(True), lambda: h, lambda: h * 0),
    "over rows": lambda h: h - ops.median(h, 1, keepdims=True),
    "pooling of rows": lambda h: ops.average_pool(h, 3, 1, "same"),
}


DECIDED: dict[str, Any] = {
    "if": lambda h: h * 0 if ops.any(h > 1e9) else h,
    "int": lambda h: h * int(ops.max(h * 0 + 1)),
    "cond": lambda h: tf.cond(tf.reduce_all(tf.math.is_finite(h)), lambda: h, lambda: h * 0),
    "switch": lambda h: tf.switch_case(tf.cast(tf.reduce_any(h > 1e9), tf.int32), [lambda: h, lambda: h * 2]),
    "while": lambda h: ops.while_loop(lambda x: ops.max(x) > 1e9, lambda x: (x / 2,), (h,))[0],
}
GRAPHS = ("cond", "switch", "while")


class Mlp(keras.Model):  # type: ignore[misc]
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = L.Dense(12, name="up"), L.Dense(8, name="down"), function

    def call(self, x: Any) -> Any:
        return self.down(self.function(self.up(x)))


class Asking(Mlp):
    def call(self, x: Any) -> Any:
        return self.down(self.up(x)) if float(ops.max(x)) < 1e9 else x


def build(function: Any) -> Any:
    model = Mlp(function)
    model(rows())
    return filled(model)


def two(function: Any) -> Any:
    """A questionable pair, followed by a valid one."""
    x = given = keras.Input((5, 8))
    x = L.Lambda(function, output_shape=(5, 12))(L.Dense(12, name="up")(x))
    x = L.Dense(12, "relu", name="last_up")(L.Dense(8, name="down")(x))
    return filled(keras.Model(given, L.Dense(8, name="last_down")(x)))


def rows() -> Any:
    return tf.constant(values(4, 5, 8))


@pytest.mark.ranks(min=2, max=3)
class TestWrong:
    @pytest.mark.parametrize("name", WRONG)
    def test_auto_leaves_the_pair_whole(self, comm: Any, name: str) -> None:
        model = two(WRONG[name])
        try:
            parallelize(model, comm, "auto", report=lambda table: None)
        except UsageError as error:
            assert "finds no layer" in str(error)
        assert not hasattr(model.get_layer("up"), "style")
        near(model(rows()), two(WRONG[name])(rows()))

    @pytest.mark.parametrize("name", WRONG)
    def test_own_plans_are_refused(self, comm: Any, name: str) -> None:
        """With example= it is refused before anything is divided, otherwise at the first call, which may be traced."""
        model = build(WRONG[name])
        with pytest.raises(UsageError, match=LINE):
            parallelize(model, comm, PLAN, example=rows())
        assert not hasattr(model.up, "style")
        parallelize(model, comm, PLAN)
        with pytest.raises(UsageError, match=LINE):
            tf.function(model, autograph=False)(rows())

    @pytest.mark.parametrize("name", ["a function", "qr", "a length", "a gradient"])
    def test_activations(self, comm: Any, name: str) -> None:
        """Regression: a user's activation was taken for an elementwise one."""
        model = keras.Sequential([keras.Input((5, 8)), L.Dense(12, WRONG[name], name="up"), L.Dense(8, name="down")])
        with pytest.raises(UsageError, match="needs all outputs"):
            parallelize(model, comm, PLAN)

    def test_undecidable_operations_are_warned_of(self, comm: Any) -> None:
        """A host function may communicate: a warning gives its place."""
        model = build(lambda h: tf.ensure_shape(tf.numpy_function(lambda a: a / abs(a).sum(), [h], h.dtype), h.shape))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, comm, PLAN, example=rows())
        messages = [str(one.message) for one in caught if "the rules do not know" in str(one.message)]
        assert len(messages) == (comm.rank == 0)
        assert all("PyFunc" in text and "test_tensor_unknown.py:" in text for text in messages)

    @pytest.mark.parametrize("name", DECIDED)
    def test_a_condition_on_a_part(self, comm: Any, name: str) -> None:
        """Regression: a condition that agreed on the first batch was accepted, and later ones differed among ranks."""
        model, plain = build(DECIDED[name]), build(DECIDED[name])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, comm, PLAN, example=rows() if name in GRAPHS else None)
            near(model(rows()), plain(rows()))
        messages = [str(one.message) for one in caught if "Python numbers are read from a tensor" in str(one.message)]
        assert len(messages) == (comm.rank == 0)
        assert all("test_tensor_unknown.py:" in text for text in messages)

    def test_iteration_over_elements_is_warned_of(self, comm: Any) -> None:
        """Regression: a model without a graph was silently checked only up to that point."""
        model = Asking(None)
        model(rows())
        parallelize(filled(model), comm, PLAN)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            near(model(rows()), build(lambda h: h)(rows()))
        assert sum("cannot be traced" in str(one.message) for one in caught) == (comm.rank == 0)

    def test_divided_layers_in_a_loop(self, comm: Any) -> None:
        class Looped(Mlp):
            def call(self, x: Any) -> Any:
                return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, self.down(self.up(y))), [0, x])[1]

        model = Looped(None)
        model(rows())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, comm, PLAN, example=rows())
        assert sum("up, down run in a loop" in str(one.message) for one in caught) == (comm.rank == 0)


@pytest.mark.ranks(max=3)
class TestRight:
    @pytest.mark.parametrize("way", ["example", "first call"])
    @pytest.mark.parametrize("name", RIGHT)
    def test_valid_operations_pass_without_a_warning(self, comm: Any, name: str, way: str) -> None:
        model, plain = build(RIGHT[name]), build(RIGHT[name])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, comm, PLAN, example=None if way == "first call" else rows())
            near(model(rows()), plain(rows()))
        assert not [str(one.message) for one in caught if "plan" in str(one.message)]


WRITTEN: dict[str, Any] = {
    "silu": ops.silu,
    "silu with a slope": lambda h: tf.nn.silu(h, 1.5),
    "a gradient": turns_gradient,
    "a gradient of two": lambda h: tf.custom_gradient(lambda u, v: (u * v, lambda g: (g * v / 2, g * u)))(
        h, ops.tanh(h)
    ),
    "elementwise": lambda h: tf.math.asinh(h) + tf.math.lgamma(h * h + 1),
}


@pytest.mark.ranks(min=2, max=3)
class TestAuto:
    """Regression: a pair with SiLU between, which has a custom gradient in TensorFlow, was left whole."""

    @pytest.mark.parametrize("name", WRITTEN)
    def test_auto_divides_valid_pairs(self, comm: Any, name: str) -> None:
        model = same(lambda: two(WRITTEN[name]), "auto", comm, values(4, 5, 8))
        assert hasattr(model.get_layer("up"), "style")

    def test_incomparable_pairs_stay_whole(self, comm: Any) -> None:
        """A model that communicates by itself has no whole to run."""
        inner = two(turns_gradient)
        model = keras.Model(inner.input, L.Lambda(lambda y: copy(y, comm), output_shape=(5, 8))(inner.output))
        parallelize(model, comm, "auto", report=lambda table: None)
        assert not hasattr(model.get_layer("up"), "style")
        assert hasattr(model.get_layer("last_up"), "style")


class Centred(keras.layers.Layer):  # type: ignore[misc]
    """Uses all features, only in training."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x - ops.mean(x, -1, keepdims=True) if training else x


class Branching(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.centred, self.down = L.Dense(8, name="up"), Centred(), L.Dense(4, name="down")

    def call(self, x: Any) -> Any:
        return self.down(self.centred(self.up(x)))


@pytest.mark.ranks(min=2)
def test_training_behaviour_is_checked(comm: Any) -> None:
    """Regression: plans were compared in evaluation only, and training behaviour passed unchecked."""
    plan = {"up": Column(), "down": Row()}
    x = values(2, 6)
    for options in ({}, {"verify": x}):
        functional = sequential(L.Dense(8, name="up"), Centred(), L.Dense(4, name="down"), shape=(6,))
        with pytest.raises(UsageError, match="entred"):
            parallelize(functional, comm, plan, **options)
    both = sequential(
        L.Dense(8, name="up"), Centred(), L.Dense(4, name="down"), L.Dense(8, name="other_up"), L.Dense(4), shape=(6,)
    )
    parallelize(both, comm, "auto", report=lambda table: None)  # it raised, and now leaves the pair whole
    assert not hasattr(both.get_layer("up"), "style")
    assert hasattr(both.get_layer("other_up"), "style")
    subclassed = Branching()
    subclassed(x)
    parallelize(subclassed, comm, plan)
    subclassed(x)
    for _ in range(2):  # each time
        with pytest.raises(UsageError, match="entred"):
            subclassed(x, training=True)
    subclassed(x)
