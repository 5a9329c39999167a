"""Exports and files: Keras writes unsharded models only; sharded ones are refused before writing starts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format

from commlib_tensorflow._keras_reduction import replace
from commlib_tensorflow.tensor._file_layers import FileLayer


def watch_exports() -> None:
    """Refuse, from now on, to export sharded models and to write them into files."""
    for owner, name in ((keras.Model, "export"), (keras.export.ExportArchive, "track")):
        replace(_defining(owner, name), name, _refusing_exports)
    for name in ("save", "save_weights"):
        replace(_defining(keras.Model, name), name, _refusing_files)
    if "save_model_to_hdf5" in vars(legacy_h5_format):  # private; keras.saving.save_model uses it
        replace(legacy_h5_format, "save_model_to_hdf5", _refusing_files)


def _defining(owner: Any, name: str) -> Any:
    return next(kind for kind in owner.__mro__ if name in vars(kind))


def _refusing_exports(original: Any) -> Any:
    return _refusing(original, lambda layer: layer.check_export())


def _refusing_files(original: Any) -> Any:
    return _refusing(original, lambda layer: layer.check_unsharded())


def _refusing(original: Any, check: Callable[[FileLayer], None]) -> Any:
    @functools.wraps(original)
    def whole(self: Any, *args: Any, **options: Any) -> Any:
        given = [one for one in (self, *args, *options.values()) if isinstance(one, keras.layers.Layer)]
        for layer in (inner for one in given for inner in one._flatten_layers()):
            if isinstance(layer, FileLayer):
                check(layer)
        return original(self, *args, **options)

    return whole
