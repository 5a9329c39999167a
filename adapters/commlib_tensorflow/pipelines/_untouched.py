"""Untouched: run a user's layers without a trace: variables, attributes and random numbers are as before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf


@contextmanager
def untouched(layers: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
    """Give layers, with those within them, and variables back what they had, whatever happens within.

    Of attributes that are lists or dictionaries, what these hold. Random numbers: those of numpy and of Python.
    """
    values = [(variable, tf.identity(variable.value)) for variable in variables]
    every = list({id(one): one for layer in layers for one in layer._flatten_layers()}.values())
    attributes = [(layer, {name: (own, _held(own)) for name, own in vars(layer).items()}) for layer in every]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for layer, before in attributes:
            own = vars(layer)
            for name in [name for name in own if name not in before]:
                del own[name]
            for name, (value, held) in before.items():
                own[name] = value
                if held is not None:
                    _put_back(value, held)
        for variable, value in values:
            variable.assign(value)


def _held(value: Any) -> Any:
    return _plain(value) if isinstance(value, list | dict | set) else None


def _plain(value: Any) -> Any:
    """Return the list, dictionary or set of Python that one of TensorFlow's or Keras' is, or keeps."""
    inner = getattr(value, "__wrapped__", getattr(value, "_storage", value))
    kind = next(kind for kind in (list, dict, set) if isinstance(inner, kind))
    return kind(inner)


def _put_back(value: Any, held: Any) -> None:
    """Give a list, dictionary or set back what it held, past whoever notes that it changes."""
    for own in (value, getattr(value, "__wrapped__", None), getattr(value, "_storage", None)):
        if isinstance(own, list):
            list.__setitem__(own, slice(None), held)
        elif isinstance(own, dict) and not hasattr(own, "__wrapped__"):
            dict.clear(own)
            dict.update(own, held)
        elif isinstance(own, set):
            set.clear(own)
            set.update(own, held)
