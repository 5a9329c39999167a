"""Sharded weights of a model, whose shapes the model's own code may query."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.styles import Column, Row, Sequence, Vocabulary
from commlib_torch._shards import shards_of
from commlib_torch.tensor.layers import find_layer


def sharded_weights(model: nn.Module, styles: Collection[str]) -> Iterator[tuple[str, nn.Parameter, Sharding]]:
    """Yield (layer, parameter, sharding) of weights that are sharded, or will be by a mapping of styles."""
    for name, module in model.named_modules():
        for own, shard in shards_of(module).items():
            if isinstance(shard.sharding, Sharding) and (weight := vars(module)["_parameters"].get(own)) is not None:
                yield name, weight, shard.sharding
        style: Any = styles.get(name) if isinstance(styles, Mapping) else None
        if isinstance(style, Column | Row | Sequence | Vocabulary) and not hasattr(module, "become"):
            kind: Any = find_layer(name, module, style)
            for own, sharding in kind.shardings(module, name, style).items():
                if own not in vars(module)["_buffers"]:  # running moments of norms
                    yield name, module.get_parameter(own), sharding
