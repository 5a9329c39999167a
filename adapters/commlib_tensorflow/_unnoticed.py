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
from commlib.functional.unnoticed import Held, attributes
from commlib.functional.unnoticed import unnoticed as unnoticed_by


@contextmanager
def unnoticed(model: Any, *given: Any) -> Iterator[None]:
    """Leave a model, what it is called with, and the states of random generators as they were before.

    Variables of Keras are left alone: who runs a model for a look does so in a `keras.StatelessScope`.
    """
    with unnoticed_by((model, given), _hold):
        yield


def _hold(value: Any) -> Held | None:
    if isinstance(value, keras.layers.Layer):
        own = attributes(value)
        return Held(own.restore, [*own.inside, *(vars(kind).get("call") for kind in type(value).__mro__)])
    if isinstance(value, tf.Variable):
        return Held(functools.partial(_put_back, value, value.numpy()))
    if isinstance(value, Mixture | Counted):
        return attributes(value)
    return None


def _put_back(variable: Any, before: Any) -> None:
    if not np.array_equal(variable.numpy(), before):
        variable.assign(before)
