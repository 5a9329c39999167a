"""Calls of a divided model with different arguments from Keras: masks, optional inputs, any number of arguments."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from commlib.errors import MismatchError, UsageError
from commlib.tensor_parallel import Column, Plan, Row
from commlib_tensorflow.tensor import parallelize
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"block/up": Column(), "block/down": Row()}
OWN: Plan = {"up": Column(), "down": Row()}
X, MASK = values(2, 3, 6), tf.constant([[True, True, False], [True, False, False]])

pytestmark = pytest.mark.ranks(min=2)


class Block(keras.layers.Layer):  # type: ignore[misc]
    """Uses all features if there is a mask, or no second input."""

    supports_masking = True

    def __init__(self, goes_by: str = "mask") -> None:
        super().__init__(name="block")
        self.up, self.down, self.goes_by = L.Dense(8, "relu", name="up"), L.Dense(4, name="down"), goes_by

    def call(self, x: Any, other: Any = None, mask: Any = None) -> Any:
        hidden = self.up(x)
        is_given = mask is not None if self.goes_by == "mask" else other is None
        return self.down(ops.softmax(hidden) if is_given else hidden)


def functional(*, optional: bool = False) -> Any:
    given = keras.Input((3, 6))
    if not optional:
        return filled(keras.Model(given, Block()(given)))
    other = keras.Input((3, 1), optional=True)
    return filled(keras.Model([given, other], Block("other")(given, other)))


def sequential() -> Any:
    return filled(keras.Sequential([keras.Input((3, 6)), Block()]))


@pytest.mark.parametrize("make", [functional, sequential])
def test_an_explicit_mask(comm: Any, make: Any) -> None:
    """Regression: models that Keras calls itself were not checked again."""
    model = parallelize(make(), comm, PLAN)
    near(model(X), make()(X))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(X, mask=MASK)


@pytest.mark.parametrize("make", [functional, sequential])
def test_an_implicit_mask(comm: Any, make: Any) -> None:
    model = parallelize(make(), comm, PLAN)
    near(model(X), make()(X))
    masked = L.Masking()(tf.constant(X))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model(masked)


def test_an_optional_input_that_is_omitted_later(comm: Any) -> None:
    model, other = parallelize(functional(optional=True), comm, PLAN), values(2, 3, 1)
    near(model([X, other]), functional(optional=True)([X, other]))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        model([X, None])


class Several(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = L.Dense(8, "relu", name="up"), L.Dense(4, name="down")

    def call(self, *given: Any, training: bool = False) -> Any:
        hidden = self.up(sum(given))
        return self.down(ops.softmax(hidden) if len(given) == 3 else hidden)


def test_any_number_of_arguments(comm: Any) -> None:
    """Regression: the check received only the first one."""
    models = []
    for _ in range(2):
        model = Several()
        model(X)
        models.append(filled(model))
    plain, divided = models[0], parallelize(models[1], comm, OWN)
    near(divided(X), plain(X))
    near(divided(X, 2 * X), plain(X, 2 * X))
    with pytest.raises(UsageError, match=r"[Ss]oftmax"):
        divided(X, 2 * X, X)


class Own(keras.Model):  # type: ignore[misc]
    """Applies `how` to a value between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = L.Dense(8, "relu", name="up"), L.Dense(4, name="down")

    def call(self, x: Any, how: Any = None) -> Any:
        hidden = self.up(x)
        return self.down(hidden if how is None else ops.tanh(hidden) if how == "tanh" else how(self, hidden))


def own(comm: Any) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        model = Own()
        model(X)
        models.append(filled(model))
    return models[0], parallelize(models[1], comm, OWN)


def hang_on_variable(model: Any, hidden: Any) -> Any:
    vars(model.up.kernel)["_of_mine"] = hidden
    return hidden


def hang_on_tensor(model: Any, hidden: Any) -> Any:
    shown = ops.tanh(hidden)
    vars(shown)["_of_mine"] = hidden
    model.shown = shown
    return hidden


@pytest.mark.parametrize("how", [hang_on_variable, hang_on_tensor])
def test_values_stored_under_a_private_name(comm: Any, how: Any) -> None:
    _, model = own(comm)
    with pytest.raises(UsageError, match="kept"):
        model(X, how=how)


ASKED = {
    "get_shape": lambda model, hidden: hidden / model.up.kernel.value.get_shape()[1],
    "get_weights": lambda model, hidden: hidden / model.up.get_weights()[0].shape[1],
    "ones": lambda model, hidden: hidden / ops.sum(ops.ones_like(model.up.bias)),
    "zeros": lambda model, hidden: hidden / tf.cast(tf.size(tf.zeros_like(model.up.bias)), hidden.dtype),
}


@pytest.mark.parametrize("name", ASKED)
def test_numbers_of_a_weights_shape(comm: Any, name: str) -> None:
    _, model = own(comm)
    with pytest.raises(UsageError, match=r"of the unsharded|differs|its shape"):
        model(X, how=ASKED[name])


def test_ranks_on_different_paths(comm: Any) -> None:
    """Regression: both paths were new kinds, so that all ranks checked, without comparing the paths."""
    plain, model = own(comm)
    near(model(X), plain(X))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X, how="tanh" if comm.rank else lambda _, hidden: ops.relu(hidden))
    messages = [str(one.message) for one in caught if "run other operations in this call" in str(one.message)]
    assert len(messages) == (comm.rank == 0), messages


def test_a_flag_given_on_one_rank_only(comm: Any) -> None:
    """The others continue without a check; the error names the call that is checked."""
    _, model = own(comm)
    model(X)
    with pytest.raises(MismatchError) as caught:
        model(X, how="tanh") if comm.rank == 0 else model(X)
    assert comm.rank or "has started to check the plan of a sharded model" in str(caught.value)


def asks(function: Any = tf.executing_eagerly) -> bool:
    return bool(function())


@pytest.mark.parametrize("function", [asks, tf.compat.v1.executing_eagerly])
def test_aliases_of_executing_eagerly(comm: Any, function: Any) -> None:
    _, model = own(comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X, how=lambda _, hidden: hidden * 2 if function() else hidden)
    messages = [str(one.message) for one in caught if "checks whether it runs eagerly" in str(one.message)]
    assert len(messages) == (comm.rank == 0), messages
