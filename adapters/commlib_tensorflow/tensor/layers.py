"""Layers that can be divided: which class does that for a plain layer of Keras and a style."""

from __future__ import annotations

from typing import Any

import keras

from commlib.errors import UsageError
from commlib.tensor.styles import Column, Replicate, Row, Style
from commlib_tensorflow.tensor.dense import ColumnDense, RowDense

_LAYERS: dict[tuple[type, type[Style]], type] = {
    (keras.layers.Dense, Column): ColumnDense,
    (keras.layers.Dense, Row): RowDense,
}


def find_layer(name: str, layer: Any, style: Style) -> type:
    """Return the class that a layer becomes. Raises UsageError if none is known."""
    if isinstance(style, Replicate):
        return type(layer)
    for (plain, kind), found in _LAYERS.items():
        if type(layer) is plain and isinstance(style, kind):
            return found
    able = sorted({plain.__name__ for plain, kind in _LAYERS if isinstance(style, kind)})
    raise UsageError(
        f"plan: {name} is a {type(layer).__name__}, but {type(style).__name__} is for {', '.join(able) or 'no layer'}"
    )
