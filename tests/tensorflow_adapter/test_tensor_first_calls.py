"""Checks of the first call of each kind of a divided model; without them other kinds computed wrong results."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops
from tensorflow import executing_eagerly

from commlib.errors import MismatchError, UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import parallelize, plan_check
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]  # a fixture

L = keras.layers
PLAN: Any = {"up": Column(), "down": Row()}
X = values(3, 6)


class Model(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that is wrong on parts if an argument equals `wrong`, or how=True."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.up, self.down, self.wrong = L.Dense(8, "relu", name="up"), L.Dense(4, name="down"), wrong

    def call(self, x: Any, gate: Any = None, how: Any = "", training: bool = False) -> Any:
        several = isinstance(x, list | dict)
        first = (x[0] if isinstance(x, list) else x["a"]) if several else x
        hidden = self.up(first)
        if how == "features":
            return hidden
        result = {
            "training": training, "evaluation": not training, "list": isinstance(x, list), "dict": isinstance(x, dict),
            "gate": gate is not None, "rank": len(first.shape) == 3,
            "integers": gate is not None and "int" in gate.dtype.name,
        }  # fmt: skip
        if result.get(self.wrong, False) or how is True or how == "softmax":
            hidden = ops.softmax(hidden)
        return self.down(hidden if gate is None else hidden * ops.cast(gate, hidden.dtype))


def build(comm: Any, wrong: str = "", **options: Any) -> tuple[Any, Any]:
    """Return a plain model and its divided copy."""
    plain, model = Model(), Model()
    for one in (plain, model):
        one(X)
        filled(one)
        one.wrong = wrong
    return plain, parallelize(model, comm, PLAN, **options)


class Failing(Model):
    """A model that fails until a flag is cleared, or only during a check."""

    fails: Any = False

    def call(self, x: Any, gate: Any = None, how: Any = "", training: bool = False) -> Any:
        if self.fails is True or (self.fails == "looks" and self.up.plan_check.is_checking):
            raise ValueError("not yet")
        return super().call(x, gate, how, training)


EAGER: Any = {
    "eager": lambda: tf.executing_eagerly(),
    "name": lambda: executing_eagerly(),
    "graph": lambda: not (tf.inside_function()),
}


@dataclass(frozen=True)
class Options:
    flag: bool = False


class Other(Model):
    """A model that depends on arguments other than flags and strings."""

    def call(self, x: Any, gate: Any = None, how: Any = "", training: bool = False) -> Any:
        hidden = how(self.up(x)) if callable(how) else self.up(x)
        wrong = how.flag if isinstance(how, Options) else how in EAGER and EAGER[how]()
        return self.down(ops.softmax(hidden) if wrong else hidden)


def other(comm: Any) -> Any:
    model = Other()
    model(X)
    return parallelize(filled(model), comm, PLAN)


def _scaled(function: Any) -> Any:
    return lambda hidden: function(hidden)


OTHERS: dict[str, tuple[Any, Any]] = {
    "closure": (_scaled(tf.nn.relu), _scaled(tf.nn.softmax)),
    "partial": (functools.partial(ops.leaky_relu, negative_slope=0.1), functools.partial(ops.softmax, axis=-1)),
    "traced": (tf.function(lambda hidden: hidden * 2), tf.function(lambda hidden: tf.nn.softmax(hidden))),
    "dataclass": (Options(), Options(True)),
    "function": (tf.nn.relu, lambda hidden: ops.softmax(hidden)),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", OTHERS)
def test_kinds_of_calls_are_distinguished(comm: Any, name: str) -> None:
    """Regression: the second call silently gave a wrong result."""
    model, (right, wrong) = other(comm), OTHERS[name]
    model(X, how=right)
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(X, how=wrong)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("asks", ["eager", "name", "graph"])
def test_a_model_with_an_eager_path_is_reported(comm: Any, asks: str) -> None:
    """The check builds a graph, and does not see eager paths."""
    model = other(comm)
    with warned(comm, "Other checks whether it runs eagerly at "):
        model(X, how=asks)
        model(X, how=asks)


def failing(comm: Any, fails: Any) -> Any:
    model = Failing()
    model(X)
    filled(model)
    divided: Any = parallelize(model, comm, PLAN)
    divided.fails = fails
    return divided


@contextmanager
def warned(comm: Any, *texts: str) -> Iterator[None]:
    """Check that rank 0 gives these warnings, and no other rank warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(one.message) for one in caught if "plan" in str(one.message)]
    assert len(messages) == (len(texts) if comm.rank == 0 and comm.size > 1 else 0), messages
    for text, got in zip(texts, messages, strict=False):
        assert text in got


def fitted(model: Any, call: Callable[[Any], Any]) -> Any:
    """Call it within a function of TensorFlow."""
    return tf.function(lambda: call(model), autograph=False)()


def test_a_failed_call_is_no_check(comm: Any) -> None:
    """Regression: the next call of its kind was not checked."""
    model = failing(comm, True)
    with pytest.raises(ValueError, match="not yet"):
        model(X, how=True)
    model.fails = False
    for _ in range(2):
        if comm.size > 1:
            with pytest.raises(UsageError, match=r"softmax|Softmax"):
                model(X, how=True)


def test_a_check_that_fails_alone_is_reported(comm: Any) -> None:
    model = failing(comm, "looks")
    with warned(comm, "Failing failed in the check of its call, but not in the call itself"):
        for _ in range(6):
            model(X)
    model.fails = False
    model(X)


GATE = values(3, 1, seed=2)
KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "training": ("training", lambda model: model(X, training=True)),
    "a flag": ("", lambda model: model(X, how=True)),
    "a string": ("", lambda model: model(X, how="softmax")),
    "another result": ("", lambda model: model(X, how="features")),
    "another argument": ("gate", lambda model: model(X, gate=GATE)),
    "a list": ("list", lambda model: model([X, X])),
    "a dict": ("dict", lambda model: model({"a": X})),
    "another rank": ("rank", lambda model: model(X[None])),
    "a function": ("gate", lambda model: fitted(model, lambda one: one(X, gate=GATE))),
    "predict": ("dict", lambda model: model.predict({"a": X}, verbose=0)),
}


RIGHT = [one for name, one in KINDS.items() if name not in ("a flag", "a string", "another result")]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("looked_at", ["a call", pytest.param("example", marks=pytest.mark.long)])
def test_calls_of_other_kinds_are_checked(comm: Any, looked_at: str) -> None:
    """Regression: they took a different path from the checked one, and returned wrong numbers, or a part."""
    for kind, (wrong, call) in KINDS.items():
        if kind == "training" and looked_at == "example":
            continue  # it is then checked
        plain, model = build(comm, wrong, **({"example": X} if looked_at == "example" else {}))
        for _ in range(2):
            near(model(X), plain(X), what=kind)
        for _ in range(2):  # each time
            with pytest.raises(UsageError, match="divided_output" if kind == "another result" else "softmax|Softmax"):
                call(model)
        near(model(X), plain(X), what=kind)
    _, model = build(comm, "integers")
    model(X, gate=GATE)
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(X, gate=tf.ones((3, 1), tf.int32))


@pytest.mark.long
@pytest.mark.ranks(min=2)
def test_valid_calls_of_other_kinds(comm: Any) -> None:
    plain, model = build(comm)
    with warned(comm):
        for _, call in RIGHT:
            near(call(model), call(plain))


@pytest.mark.ranks(min=2)
def test_calls_of_one_kind_are_checked_once(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, shapes and graphs do not make another kind."""
    looks: list[Any] = []
    monkeypatch.setattr(plan_check, "check_first_call", lambda axis, model, call, **options: looks.append(call))
    _, model = build(comm)
    for at in range(3):
        model(X, gate=GATE, how=at)
        model(X[:2], how=at, gate=GATE[:2])
        tf.function(model, autograph=False)(X, gate=GATE, how=at)
    assert len(looks) == 1
    for _ in range(2):
        model(X, how=1.0, gate=GATE)
        model(X, how=1.0)
        model(X, how=1.0, training=True)
    assert len(looks) == 4
    model.compile("sgd", "mse")
    model.fit(X, values(3, 4), batch_size=2, epochs=2, verbose=0)
    model.evaluate(X, values(3, 4), batch_size=2, verbose=0)
    assert len(looks) == 6


@pytest.mark.long
@pytest.mark.ranks(min=2)
def test_too_many_kinds_of_calls_are_reported(comm: Any) -> None:
    _, model = build(comm)
    with warned(comm, "Model is called in more than 8 ways"):
        for at in range(11):
            model(X, how=f"number {at}")


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_wrapped_by_the_user(comm: Any, when: str) -> None:
    """Its wrapper stays, and the model is checked. Regression: the first check removed it."""
    calls: list[int] = []
    plain, model = Model(), Model()
    for one in (plain, model):
        one(X)
        filled(one)

    def wrapped(call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            calls.append(1)
            return call(*args, **options)

        return counting

    if when == "before":
        model.call = wrapped(model.call)  # type: ignore[method-assign]
    parallelize(model, comm, PLAN)
    if when == "after":
        model.call = wrapped(model.call)  # type: ignore[method-assign]
    near(model(X), plain(X))
    calls.clear()
    near(model(X), plain(X))
    assert calls == [1]
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(X, how=True)


@pytest.mark.ranks(min=2)
def test_checks_do_not_change_the_model(comm: Any) -> None:
    _, model = build(comm)
    model(X)
    assert model.__class__ is Model
    assert isinstance(model, Model)
    assert type(model).__name__ == "Model"
    assert "call" not in vars(model)


@pytest.mark.ranks(min=2)
def test_a_rank_that_fails_before_communication(comm: Any) -> None:
    """It reports its error; the others receive the error and do not wait for ever."""

    class Fails(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            if comm.rank == 0 and x.shape[-1] != 8:
                raise ArithmeticError("of a part")
            return x

    model = keras.Sequential([keras.Input((6,)), L.Dense(8, name="up"), Fails(), L.Dense(4, name="down")])
    with pytest.raises((UsageError, MismatchError)) as error:
        parallelize(model, comm, PLAN, example=X)
    assert comm.rank or ("the sharded model fails" in str(error.value) and "of a part" in str(error.value))
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
