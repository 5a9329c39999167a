"""Exports: what Keras writes for those who serve a model has all weights in one process, or is refused."""

from __future__ import annotations

import functools
from typing import Any

import keras

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow.tensor.state import InFiles


def watch_exports() -> None:
    """Refuse, from now on, to export models of which ranks have parts, as files of weights are refused."""
    for owner, name in ((keras.Model, "export"), (keras.export.ExportArchive, "track")):
        replace(next(kind for kind in owner.__mro__ if name in vars(kind)), name, _refusing)


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def whole(self: Any, *args: Any, **options: Any) -> Any:
        given = [one for one in (self, *args, *options.values()) if isinstance(one, keras.layers.Layer)]
        for layer in (inner for one in given for inner in one._flatten_layers()):
            if isinstance(layer, InFiles):
                layer.check_export()
        return original(self, *args, **options)

    return whole
