"""Variables, arrays and numbers that layers of Keras keep beside weights, in attributes: ranks must have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.communicator import Communicator
from commlib.expert.kept import Search, Told, of_classes, to_take, told_numbers

_OF_LAYERS = frozenset(vars(keras.Model())) | frozenset(vars(keras.layers.Identity()))
"""Attributes that Keras' layers have."""


def kept_of(layers: Iterable[tuple[str, Any]], model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what layers of a model keep, each value once, by where it stands."""
    known = [model, *model._flatten_layers(), *model.variables, *(one.value for one in model.variables)]
    search = Search(_is_array, known, lambda value: _attributes(value) if isinstance(value, keras.Layer) else None)
    for name, layer in layers:
        for where, value in search.kept(_attributes(layer)):
            yield f"{name}: {where}", value


def _attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer, and its weights if it is none of the model."""
    own = {name: value for name, value in vars(layer).items() if name not in _OF_LAYERS}
    return {**own, **of_classes(layer), **{f"weight {place}": one for place, one in enumerate(layer.variables)}}


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | keras.Variable | tf.Variable) or tf.is_tensor(value)


def told_of(value: Any) -> Told:
    """Return what ranks compare of a value. Tensors of TensorFlow cannot be written."""
    if isinstance(value, np.ndarray):
        kind, takes = f"array {value.dtype}{list(value.shape)}", value.flags.writeable and value.dtype.kind in "biufc"
        return Told(kind, _digest(value), takes)
    if not _is_array(value):
        return told_numbers(value)
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    kind = f"{'variable' if is_variable else 'tensor'} {value.dtype}{list(value.shape)}"
    if not hasattr(value, "numpy"):  # of a graph
        return Told(kind, "")
    return Told(kind, _digest(np.asarray(value)), is_variable)


def _digest(values: Any) -> str:
    told = repr(values.tolist()).encode() if values.dtype.kind == "O" else values.tobytes()
    return hashlib.sha256(told).hexdigest()[:16]


@contextmanager
def kept_of_rank_0(model: Any, layers: Iterable[Any], comm: Communicator) -> Iterator[None]:
    """Give variables and arrays that layers keep the values of rank 0, and their own again if what follows raises.

    layers: of a model, in its order. Rank 0 warns of what differs and is neither. Collective.
    """
    named = {f"layer {place}, {type(one).__qualname__}": one for place, one in enumerate(layers)}
    found = dict(kept_of({"the model": model, **named}.items(), model))
    taken = to_take(comm, "expertize", {where: told_of(value) for where, value in found.items()})
    before = [(found[where], np.asarray(found[where]).copy()) for where in taken]
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
