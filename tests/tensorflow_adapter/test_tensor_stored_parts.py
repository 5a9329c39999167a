"""Stored parts: values that leave a model other than by its return silently trained each rank differently."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import keras
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow import tensor as tp
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, near_shard, sequential, values

__all__ = ["in_float64"]  # a fixture

L = keras.layers
PLAN: Any = {"up": Column(), "down": Row()}
X = values(3, 6)
OUTSIDE: list[Any] = []
WEAK: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
CONTEXT: ContextVar[Any] = ContextVar("kept")
pytestmark = pytest.mark.ranks(min=2)


class Holder:
    """Stores a value."""

    last: Any = None
    every: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.seen: Any = None


class Model(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Stores the result of `what` for a divided and a whole value, at a given place."""

    def __init__(self, what: Any, door: Any) -> None:
        super().__init__()
        self.up, self.down = L.Dense(8, "relu", name="up"), L.Dense(4, name="down")
        self.what, self.door, self.aux = what, door, None
        self.lists: list[Any] = []
        self.dicts: dict[str, Any] = {}
        self.holder, self.own = Holder(), tf.Module()
        self.running = tf.Variable(tf.zeros((), tf.float64), trainable=False)
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, name="average")
        self.metric = keras.metrics.Mean(name="size")

        closed: Any = None

        def close(value: Any) -> None:
            nonlocal closed
            closed = value

        self.close, self.closed = close, lambda: closed

    def call(self, x: Any) -> Any:
        hidden = self.up(x)
        result = self.down(hidden)
        self.door(self, self.what(hidden, result))
        return result


def mean(hidden: Any, result: Any) -> Any:
    return tf.reduce_mean(hidden)


def part(hidden: Any, result: Any) -> Any:
    return hidden


def whole(hidden: Any, result: Any) -> Any:
    return tf.reduce_mean(result) + tf.reduce_sum(result**2)


def cut(hidden: Any, result: Any) -> Any:
    return tf.stop_gradient(tf.reduce_mean(hidden))


DOORS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "an attribute": (lambda model, value: setattr(model, "aux", value), lambda model: model.aux),
    "an attribute of a layer": (lambda model, value: setattr(model.up, "aux", value), lambda model: model.up.aux),
    "a list": (lambda model, value: model.lists.append(value), lambda model: model.lists[-1]),
    "a dict": (lambda model, value: model.dicts.__setitem__("aux", value), lambda model: model.dicts["aux"]),
    "an object": (lambda model, value: setattr(model.holder, "seen", [value]), lambda model: model.holder.seen[0]),
    "a global": (lambda model, value: OUTSIDE.append(value), lambda model: OUTSIDE[-1]),
    "a closure": (lambda model, value: model.close(value), lambda model: model.closed()),
    "a class": (lambda model, value: setattr(Holder, "last", value), lambda model: Holder.last),
    "a class' list": (lambda model, value: Holder.every.append(value), lambda model: Holder.every[-1]),
    "a ragged tensor": (
        lambda model, value: setattr(model.holder, "seen", tf.RaggedTensor.from_tensor(tf.reshape(value, (1, -1)))),
        lambda model: model.holder.seen.flat_values,
    ),
    "a module of TensorFlow": (
        lambda model, value: setattr(model.own, "aux", value),
        lambda model: model.own.aux,
    ),
    "a table of weak keys": (lambda model, value: WEAK.__setitem__(model, value), lambda model: WEAK[model]),
    "a context variable": (lambda model, value: CONTEXT.set(value), lambda model: CONTEXT.get()),
    "an iterator": (
        lambda model, value: setattr(model.holder, "seen", iter([value])),
        lambda model: next(model.holder.seen),
    ),
    "an attribute of a variable": (
        lambda model, value: setattr(model.average, "aux", value),
        lambda model: model.average.aux,
    ),
    "a function of TensorFlow": (
        lambda model, value: setattr(model.holder, "seen", tf.function(lambda: value)),
        lambda model: model.holder.seen(),
    ),
}
VARIABLES: dict[str, Callable[[Any, Any], Any]] = {
    "a variable of TensorFlow": lambda model, value: model.running.assign_add(value),
    "a variable of Keras": lambda model, value: model.average.assign(value),
    "a running mean": lambda model, value: model.average.assign(0.9 * model.average + 0.1 * value),
    "a metric": lambda model, value: model.metric.update_state(value),
}


def build(what: Any, door: Any) -> Any:
    model = Model(what, lambda model, value: None)
    model(X)
    filled(model)
    model.door = door
    return model


def warnings_of(call: Callable[[], Any]) -> list[str]:
    """Return the warnings of a call about the plan."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if "plan" in str(one.message)]


@pytest.mark.parametrize("door", DOORS)
def test_a_stored_part_is_refused(comm: Any, door: str) -> None:
    for what in (mean, part):
        model = parallelize(build(what, DOORS[door][0]), comm, PLAN)
        for training in (False, True):
            with pytest.raises(UsageError, match=r"(?s)kept after a model's call.*by up.*test_tensor_stored_parts\.py"):
                model(X, training=training)
    OUTSIDE.clear()


def test_an_attribute_of_the_result_is_refused(comm: Any) -> None:
    def hung(hidden: Any, result: Any) -> None:
        result.hidden = hidden

    model = parallelize(build(hung, lambda model, value: None), comm, PLAN)
    with pytest.raises(UsageError, match="kept after a model's call"):
        model(X)


def test_each_check_refuses_a_stored_part(comm: Any) -> None:
    for options in ({"example": X}, {"verify": X}):
        with pytest.raises(UsageError, match="kept after a model's call"):
            parallelize(build(mean, DOORS["an attribute"][0]), comm, PLAN, **options)
    model = parallelize(build(mean, DOORS["an attribute"][0]), comm, PLAN)
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match="kept after a model's call"):
        model.fit(X, values(3, 4), verbose=0)
    model = build(mean, DOORS["an attribute"][0])
    with pytest.raises(UsageError, match="finds no layer"):
        parallelize(model, comm, "auto", example=X, report=lambda table: None)


@pytest.mark.parametrize("door", DOORS)
def test_stored_whole_values_are_accepted(comm: Any, door: str) -> None:
    """They also train as in one process."""
    model, plain = (build(whole, DOORS[door][0]) for _ in range(2))
    parallelize(model, comm, PLAN)
    gradients = []
    for one in (model, plain):

        def step(one: Any = one) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(one(X, training=True)) + DOORS[door][1](one)
            gradients.append(tape.gradient(loss, one.trainable_variables))

        assert not warnings_of(step)
    for variable, got, expected in zip(model.trainable_variables, *gradients, strict=True):
        near_shard(got, expected, variable)
    OUTSIDE.clear()


def test_moves_keep_scalars(comm: Any) -> None:
    """Regression: outside of graphs a scalar gained a dimension."""
    assert tp.reduce(tf.constant(1.0), comm).shape == ()
    assert tp.copy(tf.constant(1.0), comm).shape == ()


def test_a_reduced_part_is_accepted(comm: Any) -> None:
    def summed(hidden: Any, result: Any) -> Any:
        return tp.reduce(tf.reduce_sum(hidden), comm)

    model = parallelize(build(summed, DOORS["an attribute"][0]), comm, PLAN)
    assert not warnings_of(lambda: model(X))
    near(model.aux, tf.reduce_sum(build(summed, DOORS["an attribute"][0]).up(X)))


def test_a_stored_part_without_a_gradient_is_reported(comm: Any) -> None:
    model = parallelize(build(cut, DOORS["an attribute"][0]), comm, PLAN)
    messages = warnings_of(lambda: [model(X) for _ in range(2)])
    assert len(messages) == (comm.rank == 0)
    assert all("without a gradient" in one and "by up" in one for one in messages)


@pytest.mark.parametrize("kind", VARIABLES)
def test_values_assigned_to_variables(comm: Any, kind: str) -> None:
    """Statistics of a part differ among ranks, and those of the whole are correct."""
    model = parallelize(build(mean, VARIABLES[kind]), comm, PLAN)
    if kind.startswith("a variable"):
        messages = warnings_of(lambda: [model(X) for _ in range(2)])
        assert len(messages) == (comm.rank == 0)
        assert all("assigned" in one and "without a gradient" in one for one in messages)
    else:
        with pytest.raises(UsageError, match=r"computed from this rank's shard alone.*test_tensor_stored_parts\.py"):
            model(X)
    model, plain = (build(whole, VARIABLES[kind]) for _ in range(2))
    parallelize(model, comm, PLAN)
    assert not warnings_of(lambda: [model(X), plain(X)])
    for one, other in zip(model.non_trainable_variables, plain.non_trainable_variables, strict=True):
        near(one, other)
    near(model.running, plain.running)


class Noting(L.Dropout):  # type: ignore[misc, name-defined]
    """A layer that stores a value."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.aux = tf.reduce_mean(inputs)
        return super().call(inputs, training=training)


def test_values_stored_within_a_keras_layer(comm: Any) -> None:
    def model_of(*behind_up: Any) -> Any:
        after = () if behind_up else (Noting(0.0, name="noting"),)
        return filled(sequential(L.Dense(8, name="up"), *behind_up, L.Dense(4, name="down"), *after, shape=(6,)))

    with pytest.raises(UsageError, match="kept within noting"):
        parallelize(model_of(Noting(0.0, name="noting")), comm, PLAN)
    assert not warnings_of(lambda: parallelize(model_of(), comm, PLAN)(X))


class KeyCache(Holder):
    pass


def test_a_cache_may_hold_a_part(comm: Any) -> None:
    """The cache holds the rank's own heads for the next call."""

    def in_an_object(model: Any, value: Any) -> None:
        model.keys_cache.seen = value

    doors = (lambda model, value: setattr(model, "key_cache", value), in_an_object)
    for door in doors:
        model = build(part, door)
        model.keys_cache = KeyCache()
        parallelize(model, comm, PLAN)
        assert not warnings_of(functools.partial(model, X))


def test_storing_a_part_can_be_allowed(comm: Any) -> None:
    model = parallelize(build(mean, DOORS["an attribute"][0]), comm, PLAN, divided_output=True)
    assert not warnings_of(lambda: model(X))


class Busy(keras.Model):  # type: ignore[misc]
    """Leaves references to tensors in many places: masks, branches, loops, losses, and cycles of dead objects."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = L.Embedding(7, 6, mask_zero=True), L.Dense(8, "relu", name="up")
        self.down, self.drop, self.norm = L.Dense(4, name="down"), L.Dropout(0.3), L.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.up(self.table(x))
        doubled = hidden * 2.0
        first = tf.cond(tf.reduce_sum(x) > 0, lambda: doubled * 2.0, lambda: doubled * 3.0)
        second = tf.while_loop(lambda at, _: at < 3, lambda at, so: (at + 1, so + doubled), (0, hidden))[1]
        cycle: list[Any] = [hidden]
        cycle.append(cycle)

        def again(value: Any, depth: int) -> Any:
            return value if depth == 0 else again(value + hidden, depth - 1)

        result = self.norm(self.down(first + second + again(hidden, 2)), training=training)
        self.add_loss(tf.reduce_mean(result**2))
        return self.drop(result, training=training)


def test_internal_references_are_not_reported(comm: Any) -> None:
    model, words = Busy(), tf.constant([[1, 2, 0], [3, 4, 5]])
    model(words)
    parallelize(filled(model), comm, PLAN)
    messages = warnings_of(lambda: [model(words), model(words, training=True)])
    assert not [one for one in messages if "kept" in one], messages
