"""Variables that optimizers are given: those of Keras, and TensorFlow's own beside them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def path_of(variable: Any) -> str:
    """Return what a variable is called: its path in Keras, or its name, as that of a temperature of one's own."""
    return str(getattr(variable, "path", variable.name))


def dtype_of(variable: Any) -> str:
    """Return the name of its dtype."""
    return str(tf.as_dtype(variable.dtype).name)
