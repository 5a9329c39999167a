"""Padding: tokens that are not routed to any expert."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from commlib.errors import UsageError


def padding_mask(name: str, inputs: Any, mask: Any) -> Any:
    """Return a bool mask of the tokens that are not padding; None without a mask. Raises UsageError for another shape.

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


def zero_padding(x: Any, keep: Any) -> Any:
    """Return x with zeros for padding: NaN or infinity in padding would reach weights."""
    return x if keep is None else tf.where(keep[..., None], x, tf.zeros((), x.dtype))
