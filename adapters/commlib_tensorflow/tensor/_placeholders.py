"""Placeholders: replace weights that are all zeros by other values, for a trial run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.checks.placeholders import make_placeholder
from commlib_tensorflow._shards import own_of, whole_shape


@contextmanager
def substitute_weights(model: Any, names: Collection[str]) -> Iterator[None]:
    """Replace the values of the weights with these names within the context: a sharded weight gets its shard.

    Values that were read for a backward do not change.
    """
    with tf.init_scope():  # outside of tapes and graphs
        weights = [(name, weight, weight._value) for name, weight in _weights(model) if name in names]
        before = [tensor.read_value() for _, _, tensor in weights]
    try:
        with tf.init_scope():
            for name, weight, tensor in weights:
                tensor.assign(tf.cast(own_of(weight, make_placeholder(name, whole_shape(weight))), tensor.dtype))
        yield
    finally:
        with tf.init_scope():
            for (_, _, tensor), value in zip(weights, before, strict=True):
                tensor.assign(value)


def zeros_in(model: Any) -> frozenset[str]:
    """Return the names of weights that are all zeros on this rank."""
    with tf.init_scope():
        return frozenset(name for name, weight in _weights(model) if not tf.math.count_nonzero(weight._value))


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trainable weights, frozen or not, by index: Keras' names count the objects that a process has made.

    The values come from the underlying variables, even in a scope that overrides them.
    """
    every = {id(weight): weight for layer in model._flatten_layers() for weight in layer._trainable_variables}
    for place, weight in enumerate(every.values()):
        tensor = weight._value
        if isinstance(tensor, tf.Variable) and tensor.dtype.is_floating and tensor.shape.num_elements():
            yield f"weight {place}", weight
