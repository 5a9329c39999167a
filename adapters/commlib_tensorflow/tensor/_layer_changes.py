"""Layer changes: detect layers added to or removed from a Sequential of a sharded model after its plan was checked."""

from __future__ import annotations

import functools
from typing import Any

import keras

from commlib_tensorflow._keras_reduction import replace


def watch_changes() -> None:
    """Make sharded models be checked again after a Sequential in them has changed."""
    for name in ("add", "pop"):
        replace(keras.Sequential, name, _wrap_change)


def _wrap_change(original: Any) -> Any:
    @functools.wraps(original)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        for layer in self._flatten_layers():
            check = getattr(layer, "plan_check", None)
            if check is not None:
                check.change()
        return original(self, *args, **options)

    return told
