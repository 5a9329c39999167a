"""Changes: layers that are put into a Sequential of a divided model, or taken out of it, after its plan was checked."""

from __future__ import annotations

import functools
from typing import Any

import keras

from commlib_tensorflow._keras_reduction import replace


def watch_changes() -> None:
    """Let divided models be checked again when a Sequential in them has changed."""
    for name in ("add", "pop"):
        replace(keras.Sequential, name, _telling)


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        for layer in self._flatten_layers():
            check = getattr(layer, "plan_check", None)
            if check is not None:
                check.change()
        return original(self, *args, **options)

    return told
