"""Stand-ins: give a model of Keras other numbers for weights that are zeros, for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from commlib.tensor_parallel.checks.stand_ins import stand_in
from commlib_tensorflow._shards import own_of, whole_shape


@contextmanager
def standing_in(model: Any, names: Collection[str]) -> Iterator[None]:
    """Let weights of these names be something else for a while: of one that is divided, this rank's part of it.

    What has been read for a backward stays as it was.
    """
    with tf.init_scope():  # which no tape sees, and no graph
        found = [(name, weight, weight._value) for name, weight in _weights(model) if name in names]
        before = [tensor.read_value() for _, _, tensor in found]
    try:
        with tf.init_scope():
            for name, weight, tensor in found:
                tensor.assign(tf.cast(own_of(weight, stand_in(name, whole_shape(weight))), tensor.dtype))
        yield
    finally:
        with tf.init_scope():
            for (_, _, tensor), value in zip(found, before, strict=True):
                tensor.assign(value)


def zeros_in(model: Any) -> frozenset[str]:
    """Return the names of weights that have zeros alone, on this rank."""
    with tf.init_scope():
        return frozenset(name for name, weight in _weights(model) if not tf.math.count_nonzero(weight._value))


def _weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a model learns, frozen or not, by its place: Keras counts in names what a process has made before.

    It is what the model's variables are kept in, past a scope in which they have other values.
    """
    every = {id(weight): weight for layer in model._flatten_layers() for weight in layer._trainable_variables}
    for place, weight in enumerate(every.values()):
        tensor = weight._value
        if isinstance(tensor, tf.Variable) and tensor.dtype.is_floating and tensor.shape.num_elements():
            yield f"weight {place}", weight
