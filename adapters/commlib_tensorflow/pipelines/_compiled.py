"""Compiled: say in lines what ranks have been given by compile(), and what layers they have, to compare it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from commlib_tensorflow._keras_reduction import Distributed


def lines_of(optimizer: Any, loss: Any, metrics: Any) -> list[str]:
    """Return what has to be the same on all ranks: an optimizer's settings, losses and metrics, as far as they tell.

    Not their names, which count what a process has made before.
    """
    settings = {} if optimizer is None else _settings(optimizer)
    kinds = [("loss", leaf) for leaf in keras.tree.flatten(loss)] + [("metric", leaf) for leaf in _leaves(metrics)]
    return [
        f"optimizer {'none' if optimizer is None else type(optimizer).__name__}",
        *(f"its {name} {_plain(value)}" for name, value in sorted(settings.items()) if name != "name"),
        *(f"{what} {_kind(leaf)}" for what, leaf in kinds),
    ]


def options_of_layers(stage: int, part: Any) -> list[str]:
    """Return a line for each layer of a stage, with its options: of layers without a configuration, their kind."""
    found = [layer for layer in part._flatten_layers() if not isinstance(layer, keras.Model)]
    return [f"a layer of stage {stage}: {_options(layer)}" for layer in found]


def _options(layer: Any) -> str:
    try:
        config: Mapping[str, Any] = layer.get_config()
    except Exception:  # it has none
        config = {}
    policy = getattr(getattr(layer, "dtype_policy", None), "name", "")
    # What weights began as does not count any more; variables are compared by themselves.
    said = {name: _plain(one) for name, one in config.items() if name not in _NOT_COMPARED and "_init" not in name}
    options = ", ".join(f"{name}={one!r}" for name, one in sorted(said.items()))
    return f"{type(layer).__name__} ({', '.join(filter(None, (policy, options)))})"


_NOT_COMPARED = frozenset(("name", "dtype", "batch_shape", "seed"))
"""Names count what a process has made before. Seeds may differ: each stage draws by its own."""


def _leaves(metrics: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(metrics) if leaf is not None]


def _kind(leaf: Any) -> str:
    if leaf is None or isinstance(leaf, str):
        return str(leaf)
    name = getattr(leaf, "__name__", type(leaf).__name__)
    return " ".join([str(name), *([str(leaf.reduction)] if hasattr(leaf, "reduction") else [])])


def _settings(optimizer: Any) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = optimizer.get_config()
    except Exception:  # it has none
        return {}
    if not isinstance(optimizer, Distributed):
        return config
    # Groups of ranks have names of their own in each stage.
    return {name: value for name, value in config.items() if isinstance(value, bool | int | float | None)}


def _plain(value: Any) -> Any:
    """Return what ranks can compare: numbers and words; of other things, their kind."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value, key=str) if key != "name"}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
