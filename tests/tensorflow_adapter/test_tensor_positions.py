"""Layers without weights that use other positions: `Sequence` accepted them, and they silently saw only a part."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"own": Sequence(1), "up": Column(sequence=1), "down": Row(sequence=1)}
WRONG: dict[str, Any] = {
    "centering": lambda x: x - ops.mean(x, 1, keepdims=True),
    "a norm of all": lambda x: x / ops.sqrt(ops.mean(x**2)),
    "a running sum": lambda x: ops.cumsum(x, 1),
    "its number": lambda x: x + ops.cast(ops.arange(x.shape[1]), x.dtype)[:, None],
}
RIGHT: dict[str, Any] = {
    "features": lambda x: x - ops.mean(x, -1, keepdims=True),
    "elements": lambda x: x * 2,
    "dropout": lambda x: x * keras.random.uniform(ops.shape(x), 1, 1.0000000000001, dtype=x.dtype),
}


class Applied(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self, function: Any) -> None:
        super().__init__(name="own")
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def build(function: Any, tokens: int) -> Any:
    given = keras.Input((tokens, 8))
    x = Applied(function)(given)
    return filled(keras.Model(given, L.Dense(8, name="down")(L.Dense(12, name="up")(x))))


@pytest.mark.ranks(min=2, max=3)
@pytest.mark.parametrize("name", WRONG)
def test_layers_that_use_other_positions_are_refused(comm: Any, name: str) -> None:
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(build(WRONG[name], 2), comm, PLAN)


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize("wrong", [True, False])
def test_several_inputs(comm: Any, wrong: bool) -> None:
    """With a weight for each position: regression: nothing was tried unless all inputs were floats of one shape."""
    shares = L.Lambda(lambda given: given[0] * given[1] / ops.sum(given[1], 1, keepdims=True), name="own")
    places = L.Lambda(lambda given: given[0] * given[1], name="own")
    x, weights = keras.Input((2, 8)), keras.Input((2, 1))
    model = keras.Model([x, weights], L.Dense(8, name="up")((shares if wrong else places)([x, weights])))
    plan: Plan = {"own": Sequence(1), "up": Column(sequence=1, gather=True)}
    if not wrong:
        parallelize(filled(model), comm, plan)
        return
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(filled(model), comm, plan)


@pytest.mark.ranks(min=2, max=3)
def test_layers_of_keras_are_tried_too(comm: Any) -> None:
    """Regression: the error claimed that scaling uses several positions."""
    x = keras.Input((2, 8))
    for axis, is_right in ((-1, True), (1, False)):
        own = L.UnitNormalization(axis, name="own")(L.Rescaling(2.0, name="scale")(x))
        model = filled(keras.Model(x, L.Dense(8, name="down")(L.Dense(12, name="up")(own))))
        plan = {"scale": Sequence(1), **PLAN}
        if is_right:
            parallelize(model, comm, plan)
            continue
        with pytest.raises(UsageError, match=r"own .*would see only a part of"):
            parallelize(model, comm, plan)


@pytest.mark.ranks(max=3)
@pytest.mark.parametrize("name", RIGHT)
def test_layers_on_single_positions_pass(comm: Any, name: str) -> None:
    model, x = parallelize(build(RIGHT[name], 2), comm, PLAN), values(3, 2 * comm.size, 8)
    own, whole = model(tf.split(x, comm.size, 1)[comm.rank]), build(RIGHT[name], 2 * comm.size)(x)
    near(own, tf.split(whole, comm.size, 1)[comm.rank], 1e-10)


class Beside(keras.layers.Layer):  # type: ignore[misc]
    """Takes a value of each position together with its features."""

    def __init__(self, function: Any) -> None:
        super().__init__(name="own")
        self.function = function

    def call(self, x: Any, beside: Any) -> Any:
        return self.function(x, beside)


def where(x: Any, mask: Any) -> Any:
    return tf.where(mask[..., None], x, ops.mean(x, 1, keepdims=True))


def earliest(x: Any, places: Any) -> Any:
    return x + ops.cast(places - ops.min(places, 1, keepdims=True), x.dtype)[..., None]


@pytest.mark.ranks(min=2, max=2)
@pytest.mark.parametrize(("function", "dtype"), [(where, "bool"), (earliest, "int32")])
def test_masks_and_integers(comm: Any, function: Any, dtype: str) -> None:
    """Regression: in the trial masks were all true, and integers equal, in another order."""
    x, beside = keras.Input((2, 8)), keras.Input((2,), dtype=dtype)
    model = keras.Model([x, beside], L.Dense(8, name="up")(Beside(function)(x, beside)))
    with pytest.raises(UsageError, match=r"own .*would see only a part of"):
        parallelize(filled(model), comm, {"own": Sequence(1), "up": Column(sequence=1, gather=True)})


class InTraining(Applied):
    def call(self, x: Any, training: bool = False) -> Any:
        return self.function(x) if training else x


class Model(keras.Model):  # type: ignore[misc]
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.up, self.down = own, L.Dense(12, name="up"), L.Dense(8, name="down")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.down(self.up(self.own(x, training=training) if isinstance(self.own, InTraining) else self.own(x)))


def subclassed(own: Any, tokens: int) -> Any:
    model = Model(own)
    model(values(3, tokens, 8))
    return filled(model)


def called(comm: Any, model: Any, tokens: int, **options: Any) -> tuple[Any, list[str]]:
    """Return a divided model's result for its part, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = model(tf.split(values(3, tokens, 8), comm.size, 1)[comm.rank], **options)
    return got, [str(one.message) for one in caught if "plan:" in str(one.message)]


@pytest.mark.ranks(min=2)
def test_a_layer_that_draws_in_training_is_warned_of(comm: Any) -> None:
    """It is valid in evaluation, which proves nothing about training."""
    own = InTraining(lambda x: x + keras.random.normal(ops.shape(x), dtype=x.dtype) - ops.mean(x, 1, keepdims=True))
    model = parallelize(subclassed(own, 2 * comm.size), comm, PLAN)
    _, text = called(comm, model, 2 * comm.size, training=True)
    assert len([one for one in text if "draws random numbers whenever" in one]) == (comm.rank == 0), text


def windows(x: Any) -> Any:
    pairs = [x[:, at : at + 2] for at in range(0, x.shape[1], 2)]
    return ops.concatenate([one - ops.mean(one, 1, keepdims=True) for one in pairs], 1)


@pytest.mark.ranks(min=2)
def test_windows(comm: Any) -> None:
    """Regression: they were correct for the first length, and silently wrong for another."""
    tokens = 4 * comm.size
    model = parallelize(subclassed(Applied(windows), tokens), comm, PLAN)
    got, text = called(comm, model, tokens)
    assert len([one for one in text if "parts of other lengths" in one]) == (comm.rank == 0), text
    near(got, tf.split(subclassed(Applied(windows), tokens)(values(3, tokens, 8)), comm.size, 1)[comm.rank], 1e-10)


class Counting(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="own")
        self.calls = tf.Variable(0)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        return x * 2


@pytest.mark.ranks(min=2)
def test_a_layer_with_a_tensorflow_variable(comm: Any) -> None:
    """Regression: the check read it in a graph, which is impossible."""
    model, plain = (subclassed(Counting(), 2 * comm.size) for _ in range(2))
    divided = parallelize(model, comm, PLAN)
    before = int(model.own.calls)
    got, text = called(comm, divided, 2 * comm.size)
    assert int(model.own.calls) == before + 1 and not text
    near(got, tf.split(plain(values(3, 2 * comm.size, 8)), comm.size, 1)[comm.rank], 1e-10)


@pytest.mark.ranks(min=2)
def test_layers_with_their_own_moves_pass(comm: Any) -> None:
    """The mean of all matches the whole. Regression: layers with verbs of their own were refused."""
    tokens = 2 * comm.size
    own = lambda x: x - hvd.allreduce(ops.mean(x, 1, keepdims=True), op=hvd.Average, name="mean")  # noqa: E731
    plain = subclassed(Applied(lambda x: x - ops.mean(x, 1, keepdims=True)), tokens)
    model = subclassed(Applied(own), tokens)
    got, text = called(comm, parallelize(model, comm, PLAN), tokens)
    near(got, tf.split(plain(values(3, tokens, 8)), comm.size, 1)[comm.rank], 1e-10)
    assert not text


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("is_right", [True, False])
def test_a_layer_after_a_row_that_divides_the_sequence(comm: Any, is_right: bool) -> None:
    """Regression: its length is unknown in a graph: it was not tried, and reported to draw random numbers."""
    own = Applied((lambda x: ops.gelu(x)) if is_right else (lambda x: x - ops.mean(x, 1, keepdims=True)))

    class Blocks(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.own = L.Dense(12, name="first"), L.Dense(8, name="second"), own
            self.up, self.down = L.Dense(12, name="up"), L.Dense(8, name="down")

        def call(self, x: Any) -> Any:
            return self.down(self.up(self.own(self.second(self.first(x)))))

    model, x = Blocks(), values(3, 2 * comm.size, 8)
    model(x)
    expected = filled(model)(x)
    plan: Plan = {
        "first": Column(), "second": Row(sequence=1), "own": Sequence(1), "up": Column(sequence=1), "down": Row(),
    }  # fmt: skip
    divided = parallelize(model, comm, plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_right:
            near(divided(x), expected, 1e-10)
        else:
            with pytest.raises(UsageError, match=r"own .*would see only a part of"):
                divided(x)
    assert not [str(one.message) for one in caught if "plan:" in str(one.message)]
