"""rebalance_experts: experts that are chosen often go to ranks whose experts are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commlib.expert.moving import moved
from commlib.expert.ranks import placed
from commlib_torch._bridge import array_of, on_host, to_tensor
from commlib_torch._shards import change_shard, shards_of
from commlib_torch.expert.moe import MoE


def rebalance_experts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, least: float = 1.1
) -> dict[str, tuple[float, float]]:
    """Exchange experts between ranks where that relieves the busiest one, with what an optimizer keeps for them.

    It goes by how often experts were chosen since the last time, or since `expert_stats`, by tokens of all ranks; call
    it between steps, every some hundred of them. A layer whose busiest rank would not get `least` times less stays as
    it is. Returns by the names of layers the load of the busiest rank by the mean one, before and after. Collective.
    """
    found: dict[str, tuple[float, float]] = {}
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        placement, before, after = layer.mixture.better_placement(least)
        if placement == layer.mixture.placement:
            after = before
        else:
            _move(layer, optimizer, placement)
        found[layer.mixture.name_among(found)] = before, after
    return found


@torch.no_grad()
def _move(layer: MoE, optimizer: torch.optim.Optimizer | None, placement: Any) -> None:
    stacks: list[Any] = []
    for parameter in layer.experts.parameters():
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        stacks += [parameter, *(value for _, value in sorted(kept.items()) if _is_stack(value, parameter))]
    mixture = layer.mixture
    comm = mixture.ranks.axis.comm
    arrays = moved([array_of(on_host(each)) for each in stacks], mixture.placement, placement, comm)
    for each, array in zip(stacks, arrays, strict=True):
        each.copy_(to_tensor(array))
    for module in layer.experts.modules():
        for name, shard in shards_of(module).items():
            change_shard(module, name, placed(shard, placement.owners))
    for parameter in layer.experts.parameters():
        parameter.grad = None
    mixture.place(placement)


def _is_stack(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
