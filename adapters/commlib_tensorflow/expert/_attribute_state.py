"""Attribute state of Keras layers: variables, arrays and numbers besides weights, which must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.expert.layer_values import (
    ValueDigest,
    ValueSearch,
    class_values,
    digest_array,
    digest_numbers,
    find_replaceable,
)

_OF_LAYERS = frozenset(vars(keras.Model())) | frozenset(vars(keras.layers.Identity()))
"""Attributes that every Keras layer has."""


def attribute_state_of(layers: Iterable[tuple[str, Any]], model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attribute state of a model's layers, each value once, with its location."""
    known = [model, *model._flatten_layers(), *model.variables, *(one.value for one in model.variables)]
    search = ValueSearch(_is_array, known, lambda value: _attributes(value) if isinstance(value, keras.Layer) else None)
    for name, layer in layers:
        for where, value in search.find(_attributes(layer)):
            yield f"{name}: {where}", value


def _attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer, and its weights if it does not belong to the model."""
    own = {name: value for name, value in vars(layer).items() if name not in _OF_LAYERS}
    return {**own, **class_values(layer), **{f"weight {place}": one for place, one in enumerate(layer.variables)}}


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | keras.Variable | tf.Variable) or tf.is_tensor(value)


def fingerprint_of(value: Any) -> ValueDigest:
    """Return the fingerprint of a value, which ranks compare. Tensors of TensorFlow cannot be written."""
    if isinstance(value, np.ndarray):
        return digest_array(value)
    if not _is_array(value):
        return digest_numbers(value)
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    kind = f"{'variable' if is_variable else 'tensor'} {value.dtype}{list(value.shape)}"
    if not hasattr(value, "numpy"):  # a graph tensor
        return ValueDigest(kind, "")
    return ValueDigest(kind, digest_array(np.asarray(value)).digest, is_variable)


@contextmanager
def broadcast_attribute_state(model: Any, layers: Iterable[Any], comm: Communicator) -> Iterator[None]:
    """Copy rank 0's attribute state to all ranks, and restore the own one if the body raises.

    layers: of a model, in its order. Rank 0 warns of differences in other kinds of values. Collective.
    """
    named = {f"layer {place}, {type(one).__qualname__}": one for place, one in enumerate(layers)}
    attributes = dict(attribute_state_of({"the model": model, **named}.items(), model))
    replaceable = find_replaceable(
        comm, "expertize", {where: fingerprint_of(value) for where, value in attributes.items()}
    )
    before = [(attributes[where], np.asarray(attributes[where]).copy()) for where in replaceable]
    for value, own in before:
        _put(value, comm.broadcast(own.copy()))
    try:
        yield
    except BaseException:
        for value, own in before:
            _put(value, own)
        raise


def _put(value: Any, values: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = values
    else:
        value.assign(values)
