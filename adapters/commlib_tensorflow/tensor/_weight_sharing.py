"""Weight sharing: find the layers that share a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def find_tied(layers: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the names of layers that share a weight. A layer with several names has the first."""
    names = {id(layer): name for name, layer in reversed(list(layers.items()))}
    owners: dict[int, list[str]] = {}
    for name, layer in layers.items():
        if names[id(layer)] == name:
            inner = {id(weight) for one in layer._flatten_layers(include_self=False) for weight in one.weights}
            for weight in layer.trainable_variables:
                if id(weight) not in inner:
                    owners.setdefault(id(weight), []).append(name)
    return [tuple(names) for names in dict.fromkeys(map(tuple, owners.values())) if len(names) > 1]
