"""Side-effect-free runs of a user's layers: variables, attributes and random numbers are restored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf


@contextmanager
def prevent_side_effects(layers: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
    """Restore layers, with those within them, and variables on exit, also after an error.

    Attributes that are lists or dictionaries get their contents back. Random state: numpy's and Python's.
    """
    values = [(variable, tf.identity(variable.value)) for variable in variables]
    every = list({id(one): one for layer in layers for one in layer._flatten_layers()}.values())
    attributes = [(layer, {name: (own, _copy_container(own)) for name, own in vars(layer).items()}) for layer in every]
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


def _copy_container(value: Any) -> Any:
    return _to_python(value) if isinstance(value, list | dict | set) else None


def _to_python(value: Any) -> Any:
    """Return the Python list, dictionary or set behind a container of TensorFlow or Keras."""
    inner = getattr(value, "__wrapped__", getattr(value, "_storage", value))
    kind = next(kind for kind in (list, dict, set) if isinstance(inner, kind))
    return kind(inner)


def _put_back(value: Any, held: Any) -> None:
    """Restore the contents of a list, dictionary or set without triggering its change tracking."""
    for own in (value, getattr(value, "__wrapped__", None), getattr(value, "_storage", None)):
        if isinstance(own, list):
            list.__setitem__(own, slice(None), held)
        elif isinstance(own, dict) and not hasattr(own, "__wrapped__"):
            dict.clear(own)
            dict.update(own, held)
        elif isinstance(own, set):
            set.clear(own)
            set.update(own, held)
