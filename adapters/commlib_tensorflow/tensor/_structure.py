"""Structure of a model: its Keras layers and operations with their settings, to compare between ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.comparison.agreement import digest_of
from commlib.comparison.model_signature import ModelSignature, is_function, is_plain, own_settings

_AROUND = ("name", "seed", "dtype", "build", "quantize", "built", "supports_masking", "supports_jit", "autocast")
"""Settings that Keras keeps of each layer, and that may differ: names count the objects that a process has made."""
_BASES = ("Layer", "Operation", "Model", "Sequential", "Functional")
"""Classes whose configuration describes a model, or holds the arguments of a user's class."""
_COUNTED = re.compile(r"_\d+(?=/|$)")
"""Suffixes of names, or of enclosing layers' names, that differ between ranks."""
_PENALTIES = (keras.regularizers.Regularizer, keras.constraints.Constraint)


def structure_of(model: Any, layers: Mapping[str, Any], *, closely: Container[str] = ()) -> ModelSignature:
    """Return the structure of a model: its layers by index, and the operations of those that have a graph.

    closely: names of layers for which attributes that are strings, integers and tensors are included, too.
    """
    signature = ModelSignature()
    signature.add("the model", type(model), {}, {})
    for place, (name, layer) in enumerate(layers.items()):
        where, kind = f"layer {place}", layer.__class__  # a sharded layer reports Keras' class
        is_own = not _is_of_keras(kind)
        settings = {**_configuration(layer), **_settings(layer, is_own=is_own), "trainable": layer.trainable}
        settings["dtype_policy"] = layer.dtype_policy.name
        own = _own_settings(layer, every=name in closely) if is_own else {}
        signature.add(where, kind, settings, own, name=_COUNTED.sub("", name))
    for one in (model, *layers.values()):
        for place, (kind, arguments) in enumerate(_operations(one)):
            signature.add(f"operation {place} of a {type(one).__name__}", kind, arguments, {})
    return signature


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.startswith("keras.")


def _public_attributes(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if not (name.startswith("_") or name in _AROUND)}


def _own_settings(layer: Any, *, every: bool) -> dict[str, Any]:
    public = _public_attributes(layer)
    arrays = {name: _describe(value) for name, value in public.items() if _is_array(value)} if every else {}
    return {**own_settings(public, every=every), **arrays}


def _configuration(layer: Any) -> dict[str, Any]:
    """Return numbers and strings of a layer's configuration, if Keras itself defines it."""
    owner = next(kind for kind in type(layer).__mro__ if "get_config" in vars(kind))
    if not _is_of_keras(owner) or owner.__name__ in _BASES:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about functions that no file can hold
        try:
            config = layer.get_config()
        except Exception:  # a user's object in it may fail
            return {}
    return {name: value for name, value in config.items() if name not in _AROUND and is_plain(value)}


def _settings(layer: Any, *, is_own: bool) -> dict[str, Any]:
    """Return functions, regularizers and constraints."""
    settings = {}
    for name, value in _public_attributes(layer).items():
        if isinstance(value, _PENALTIES):
            settings[name] = type(value).__qualname__, sorted(own_settings(vars(value)).items())
        elif is_function(value) and not is_own:
            settings[name] = value
    return settings


def _operations(model: Any) -> Iterator[tuple[type, dict[str, Any]]]:
    """Yield the operations in the graph of a functional model, from the outputs backwards, with their arguments."""
    by_depth = getattr(model, "_nodes_by_depth", {})
    for depth in sorted(by_depth):
        for node in by_depth[depth]:
            operation, arguments = node.operation, node.arguments
            given = [_describe(one) for one in keras.tree.flatten((arguments.args, arguments.kwargs))]
            settings = {} if isinstance(operation, keras.Layer) else _plain_settings(_public_attributes(operation))
            yield operation.__class__, {**settings, "arguments": given}


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if is_plain(value)}


def _describe(value: Any) -> Any:
    if isinstance(value, keras.KerasTensor):
        return f"{value.dtype}{list(value.shape)}"
    if _is_array(value):
        values = np.asarray(value)
        return f"{values.dtype}{values.shape}, {digest_of([values.tobytes().hex()]):x}"
    return value if is_plain(value) else type(value).__qualname__


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (tf.is_tensor(value) and hasattr(value, "numpy"))
