"""Compiled settings: describe the arguments of compile() and the layers as lines, which ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from commlib_tensorflow._keras_reduction import DistributedMixin


def lines_of(optimizer: Any, loss: Any, metrics: Any) -> list[str]:
    """Return the visible settings of optimizer, losses and metrics, which must be the same on all ranks.

    Names are left out: they count the objects that a process has made.
    """
    settings = {} if optimizer is None else _settings(optimizer)
    kinds = [("loss", leaf) for leaf in keras.tree.flatten(loss)] + [("metric", leaf) for leaf in _leaves(metrics)]
    return [
        f"optimizer {'none' if optimizer is None else type(optimizer).__name__}",
        *(f"optimizer's {name} {_plain(value)}" for name, value in sorted(settings.items()) if name != "name"),
        *(f"{what} {_kind(leaf)}" for what, leaf in kinds),
    ]


def options_of_layers(stage: int, part: Any) -> list[str]:
    """Return a line with the options of each layer of a stage; for layers without a configuration, only their class."""
    layers = [layer for layer in part._flatten_layers() if not isinstance(layer, keras.Model)]
    return [f"a layer of stage {stage}: {_options(layer)}" for layer in layers]


def _options(layer: Any) -> str:
    try:
        config: Mapping[str, Any] = layer.get_config()
    except Exception:  # it has no configuration
        config = {}
    policy = getattr(getattr(layer, "dtype_policy", None), "name", "")
    # Initial values do not matter any more; variables are compared separately.
    settings = {name: _plain(one) for name, one in config.items() if name not in _NOT_COMPARED and "_init" not in name}
    options = ", ".join(f"{name}={one!r}" for name, one in sorted(settings.items()))
    return f"{type(layer).__name__} ({', '.join(filter(None, (policy, options)))})"


_NOT_COMPARED = frozenset(("name", "dtype", "batch_shape", "seed"))
"""Names count the objects that a process has made. Seeds may differ: each stage draws its own numbers."""


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
    except Exception:  # it has no configuration
        return {}
    if not isinstance(optimizer, DistributedMixin):
        return config
    # The names of groups of ranks differ between stages.
    return {name: value for name, value in config.items() if isinstance(value, bool | int | float | None)}


def _plain(value: Any) -> Any:
    """Return a value that ranks can compare: numbers and strings; for other objects their class name."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value, key=str) if key != "name"}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
