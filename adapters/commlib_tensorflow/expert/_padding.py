"""Padding: tokens that go nowhere, whatever they hold."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from commlib.errors import UsageError


def kept(name: str, inputs: Any, mask: Any) -> Any:
    """Return which tokens are none of padding, bool, of a mask: None without one. Raises UsageError for another shape.

    name: of the layer, for errors.
    """
    if mask is None:
        return None
    mask = tf.cast(mask, tf.bool)
    if not mask.shape.is_compatible_with(inputs.shape[:-1]):
        raise UsageError(
            f"{name}: a mask {list(mask.shape)} for inputs {list(inputs.shape)}, expected {list(inputs.shape[:-1])}, "
            "False for padding"
        )
    return mask


def without(x: Any, keep: Any) -> Any:
    """Return x with zeros for padding: what is no number there would reach weights."""
    return x if keep is None else tf.where(keep[..., None], x, tf.zeros((), x.dtype))
