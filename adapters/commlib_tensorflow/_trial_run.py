"""Trial runs of Keras models: run or trace a model once more, and restore its state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.errors import UsageError
from commlib.expert.mixture import Mixture
from commlib.expert.stats import RoutingCounter
from commlib.snapshot.object_snapshot import ObjectSnapshot
from commlib.snapshot.snapshot_kinds import snapshot_attributes
from commlib.snapshot.trial_run import run_trial as unnoticed_by


def check_batches(call: str, **batches: Any) -> None:
    """Raise UsageError for a batch of a trial run that is a single number or a text."""
    for name, batch in batches.items():
        if isinstance(batch, bool | int | float | complex | str | bytes):
            raise UsageError(f"{call}: {name} is {batch!r}, expected a batch: tensors or arrays for the model")


@contextmanager
def preserve_model(model: Any, *given: Any) -> Iterator[None]:
    """Restore a model, its arguments, and the states of random generators to their state before.

    Variables of Keras are not restored: callers run a model for a trial in a `keras.StatelessScope`.
    """
    with unnoticed_by((model,), _snapshot, given):
        yield


def _snapshot(value: Any) -> ObjectSnapshot | None:
    kind = type(value)  # not __class__, which an object may fake
    if issubclass(kind, keras.layers.Layer):
        own = snapshot_attributes(value)
        return ObjectSnapshot(own.restore, [*own.inside, *(vars(one).get("call") for one in kind.__mro__)])
    if issubclass(kind, tf.Variable):
        with tf.init_scope():  # the snapshot may be taken while a graph is traced
            return ObjectSnapshot(functools.partial(_put_back, value, value.numpy()))
    if issubclass(kind, tf.types.experimental.PolymorphicFunction):
        return ObjectSnapshot(None, [value.python_function])
    if issubclass(kind, _WITH_ATTRIBUTES):
        return snapshot_attributes(value)
    return None


_WITH_ATTRIBUTES = (Mixture, RoutingCounter, tf.random.Generator, keras.callbacks.Callback, keras.optimizers.Optimizer)
"""Kinds of objects, other than layers, whose state is in their attributes."""


def _put_back(variable: Any, before: Any) -> None:
    with tf.init_scope():
        if not np.array_equal(variable.numpy(), before):
            variable.assign(before)
