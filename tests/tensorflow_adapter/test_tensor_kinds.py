"""Kinds of calls of a divided Keras model: properties that distinguish them."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import parallelize, plan_check
from commlib_tensorflow.tensor.plan_check import kind_of_call  # type: ignore[attr-defined]
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]  # a fixture

L = keras.layers
PLAN: Any = {"up": Column(), "down": Row()}
X = values(3, 6)


class Model(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that depends on a function of its hidden values, and on other arguments."""

    def __init__(self, goes: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down, self.goes = L.Dense(8, name="up"), L.Dense(4, name="down"), goes

    def call(self, x: Any, given: Any = None, training: bool = False) -> Any:
        return self.down(self.goes(self.up(ops.cast(x, "float64")), x if given is None else given))


def build_model(comm: Any, goes: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Return a plain model and its divided copy."""
    plain, model = Model(goes, **options), Model(goes, **options)
    for one in (plain, model):
        one.up.build((None, 6))
        one.down.build((None, 8))
        one.built = True
        filled(one)
    return plain, parallelize(model, comm, PLAN)


def applied(h: Any, function: Any) -> Any:
    return function(h)


def by(condition: Callable[[Any], bool]) -> Callable[..., Any]:
    return lambda h, given: ops.softmax(h) if condition(given) else ops.tanh(h)


def compose(*functions: Any) -> Any:
    return lambda h: functools.reduce(lambda h, one: one(h), functions, h)


def decorated(function: Any, times: int = 4) -> Any:
    @functools.wraps(function)
    def wrapper(h: Any) -> Any:
        return function(h)

    return wrapper if times == 1 else decorated(wrapper, times - 1)


def custom(function: Any) -> Any:
    return tf.custom_gradient(lambda h: (function(h), lambda gradient: gradient))


class Activation:
    bad = False

    @classmethod
    def run(cls, h: Any) -> Any:
        return ops.softmax(h) if cls.bad else ops.tanh(h)


class Bad(Activation):
    bad = True


class Name(str):
    __slots__ = ()


TABLE = tf.constant(values(2, 2))
TWO: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "composed": (applied, compose(ops.tanh, ops.relu), compose(ops.tanh, ops.softmax)),
    "decorated": (applied, decorated(ops.tanh), decorated(ops.softmax)),
    "custom gradient": (applied, custom(lambda h: ops.tanh(h)), custom(lambda h: ops.softmax(h))),
    "class of a method": (applied, Activation.run, Bad.run),
    "layer": (applied, L.Activation("tanh"), L.Activation("softmax")),
    "method of a layer": (applied, L.Activation("tanh").call, L.Activation("softmax").call),
    "string of one's own": (by(lambda given: given == "b"), Name("a"), Name("b")),
    "table": (by(lambda given: given["bad"]), UserDict(bad=False), UserDict(bad=True)),
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", TWO)
def test_kinds_of_calls_are_distinguished(comm: Any, name: str) -> None:
    """Regression: the second call silently gave a wrong result."""
    goes, right, wrong = TWO[name]
    plain, model = build_model(comm, goes)
    for _ in range(2):
        near(model(X, given=right), plain(X, given=right))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(X, given=wrong)
    near(model(X, given=right), plain(X, given=right))


def test_classes_of_tensors() -> None:
    given = TABLE, tf.RaggedTensor.from_tensor(TABLE), tf.sparse.from_dense(TABLE), tf.Variable(TABLE)
    kinds = [kind_of_call(False, (), {"given": one}) for one in given]
    assert len(set(kinds)) == len(given)
    assert kinds == [kind_of_call(False, (), {"given": one}) for one in given]


@pytest.mark.ranks(min=2)
def test_dtypes_are_distinguished_without_autocast(comm: Any) -> None:
    plain, model = build_model(comm, by(lambda given: given.dtype == "float32"), autocast=False)
    near(model(tf.constant(X)), plain(tf.constant(X)))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(tf.constant(X, tf.float32))


@dataclass(eq=False)
class Node:
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_a_cyclic_argument(comm: Any) -> None:
    """Regression: it raised RecursionError."""
    root = Node()
    root.children.append(Node(root))
    plain, model = build_model(comm, lambda h, given: ops.tanh(h))
    near(model(X, given=root), plain(X, given=root))


@pytest.mark.ranks(min=2)
def test_objects_that_change_with_each_call_are_one_kind(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(plan_check, "check_first_call", lambda axis, model, call, **options: looks.append(call))
    _, model = build_model(comm, lambda h, given: ops.tanh(h))
    for step in range(10):
        model(X, given=UserDict(x=tf.ones((step + 1, 2)), step=step, texts=["a"] * step))
    assert len(looks) == 1
