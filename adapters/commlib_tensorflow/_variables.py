"""Variables of optimizers: Keras variables, and plain TensorFlow ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def path_of(variable: Any) -> str:
    """Return a variable's path in Keras, or its TensorFlow name."""
    return str(getattr(variable, "path", variable.name))


def dtype_of(variable: Any) -> str:
    """Return the name of its dtype."""
    return str(tf.as_dtype(variable.dtype).name)
