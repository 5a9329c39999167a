"""Nested tensors: the tensors in the arguments and the results of a model."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a structure, in order."""
    return [leaf for leaf in keras.tree.flatten(value) if tf.is_tensor(leaf)]
