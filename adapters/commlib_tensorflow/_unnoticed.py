"""Unnoticed: run or trace a model of Keras once more, and leave it as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.expert.mixture import Mixture
from commlib.expert.stats import Counted
from commlib.snapshot.held import Held
from commlib.snapshot.holding import attributes
from commlib.snapshot.unnoticed import unnoticed as unnoticed_by


@contextmanager
def unnoticed(model: Any, *given: Any) -> Iterator[None]:
    """Leave a model, what it is called with, and the states of random generators as they were before.

    Variables of Keras are left alone: who runs a model for a look does so in a `keras.StatelessScope`.
    """
    with unnoticed_by((model,), _hold, given):
        yield


def _hold(value: Any) -> Held | None:
    kind = type(value)  # what an object itself says is its class may be made up
    if issubclass(kind, keras.layers.Layer):
        own = attributes(value)
        return Held(own.restore, [*own.inside, *(vars(one).get("call") for one in kind.__mro__)])
    if issubclass(kind, tf.Variable):
        with tf.init_scope():  # a look may begin while a graph is made
            return Held(functools.partial(_put_back, value, value.numpy()))
    if issubclass(kind, tf.types.experimental.PolymorphicFunction):
        return Held(None, [value.python_function])
    if issubclass(kind, _WITH_ATTRIBUTES):
        return attributes(value)
    return None


_WITH_ATTRIBUTES = (Mixture, Counted, tf.random.Generator, keras.callbacks.Callback, keras.optimizers.Optimizer)
"""Kinds of objects, other than layers, whose state is in their attributes."""


def _put_back(variable: Any, before: Any) -> None:
    with tf.init_scope():
        if not np.array_equal(variable.numpy(), before):
            variable.assign(before)
