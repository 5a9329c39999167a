"""rebalance_experts: experts that are chosen often go to ranks whose experts are not."""

from __future__ import annotations

from typing import Any

import keras

from commlib.expert.moving import moved
from commlib.expert.ranks import placed
from commlib_tensorflow._shards import mark, shard_of
from commlib_tensorflow._updates import lists_of
from commlib_tensorflow.expert.moe import MoE


def rebalance_experts(
    model: keras.Model, optimizer: Any = None, *, least: float = 1.1
) -> dict[str, tuple[float, float]]:
    """Exchange experts between ranks where that relieves the busiest one, with what an optimizer keeps for them.

    It goes by how often experts were chosen since the last time, or since `expert_stats`, by tokens of all ranks; call
    it between steps, every some hundred of them, such as at the end of an epoch. A layer whose busiest rank would not
    get `least` times less stays as it is. Returns by the names of layers the load of the busiest rank by the mean one,
    before and after. Collective.
    """
    found: dict[str, tuple[float, float]] = {}
    for layer in [each for each in model._flatten_layers() if isinstance(each, MoE)]:
        placement, before, after = layer.mixture.better_placement(least)
        if placement == layer.mixture.placement:
            after = before
        else:
            _move(layer, getattr(optimizer, "inner_optimizer", optimizer), placement)
        found[layer.mixture.name_among(found)] = before, after
    return found


def _move(layer: Any, optimizer: Any, placement: Any) -> None:
    stacks: list[Any] = []
    lists = {} if optimizer is None or not optimizer.built else lists_of(optimizer)
    for variable in layer.stacks:
        stacks.append(variable)
        for _, kept in sorted(lists.items()):
            value = kept[optimizer._get_variable_index(variable)]
            if value is not None and tuple(value.shape) == tuple(variable.shape):
                stacks.append(value)
    mixture = layer.mixture
    arrays = moved([each.numpy() for each in stacks], mixture.placement, placement, mixture.ranks.axis.comm)
    for each, array in zip(stacks, arrays, strict=True):
        each.assign(array)
    for variable in layer.stacks:
        shard = shard_of(variable)
        assert shard is not None
        mark(variable, placed(shard, placement.owners))
    mixture.place(placement)
