"""Names of the layers within a Keras model, as paths: "block_0/up"."""

from __future__ import annotations

from typing import Any

import keras

from commlib.errors import UsageError


def layers_of(model: Any) -> dict[str, Any]:
    """Return the layers within a model by name, the first of each name."""
    return {name: same[0] for name, same in layers_named(model).items()}


def layers_named(model: Any, verb: str = "parallelize") -> dict[str, list[Any]]:
    """Return all layers within a model by name. Raises UsageError if it is not a Keras 3 model."""
    check_model(model, verb)
    layers: dict[str, list[Any]] = {}
    _walk(model, "", (), layers)
    return layers


def check_model(model: Any, verb: str, hint: str = ": models of Keras 2 cannot be sharded, use Keras 3") -> None:
    """Raise UsageError if a model is not a Keras 3 model. hint: what is said of models of tf_keras."""
    if not isinstance(model, keras.Model):
        of = type(model).__module__.split(".")[0]
        raise UsageError(
            f"{verb}: expected a keras.Model, got {of}.{type(model).__name__}{hint if of == 'tf_keras' else ''}"
        )


def single_layer(name: str, layers: list[Any]) -> Any:
    """Return the single layer of a name. Raises UsageError if there are several."""
    if len(layers) > 1:
        raise UsageError(f"plan: {len(layers)} layers are called {name}: give them distinct names")
    return layers[0]


def _walk(layer: Any, prefix: str, above: tuple[Any, ...], layers: dict[str, list[Any]]) -> None:
    for inner in layer._layers:
        if any(inner is one for one in above):
            continue
        if isinstance(layer, keras.Sequential) and isinstance(inner, keras.Model) and inner not in layer.layers:
            continue  # the internal model of a Sequential, made of the same layers
        name = f"{prefix}{inner.name}"
        same = layers.setdefault(name, [])
        if not any(inner is one for one in same):
            same.append(inner)
        _walk(inner, f"{name}/", (*above, layer), layers)
