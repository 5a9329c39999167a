"""save_experts, load_experts: files that any number of ranks, and Keras, can read: see `commlib.expert.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import checkpoint
from commlib_torch._bridge import array_of, on_host, to_tensor
from commlib_torch._shards import shard_of
from commlib_torch._staged import Staged
from commlib_torch.expert.moe import MoE

_MOMENTS = {"exp_avg": "first", "exp_avg_sq": "second", "max_exp_avg_sq": "largest", "momentum_buffer": "momentum"}
_STEP = "step"


def save_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the mixtures of experts of a model to a file, with what an optimizer (Adam, AdamW, SGD) keeps for them.

    Experts are in it by their global numbers. Collective; the first rank writes.
    """
    layers = _layers(model)
    found = []
    for layer in layers:
        arrays = {name: _whole(tensor, tensor) for name, tensor in _named(layer)}
        for name, parameter in _named(layer):
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for key, own in _MOMENTS.items():
                if state.get(key) is not None:
                    arrays[f"{name}/{own}"] = _whole(state[key], parameter)
            if _STEP in state:
                arrays[f"{name}/{_STEP}"] = array_of(torch.as_tensor(float(state[_STEP])))
        found.append(arrays)
    if layers:
        checkpoint.write(layers[0].mixture.ranks, path, found)


def load_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `save_experts` of either framework has written: each rank takes its part. Collective.

    Raises UsageError on all ranks for another model.
    """
    layers = _layers(model)

    def put(found: list[dict[str, Array]]) -> None:
        shapes = [{name: _whole_shape(tensor) for name, tensor in _named(layer)} for layer in layers]
        checkpoint.check(found, shapes)
        with torch.no_grad():
            for layer, arrays in zip(layers, found, strict=True):
                for name, tensor in _named(layer):
                    tensor.copy_(_own(arrays[name], tensor))
                    if optimizer is not None and isinstance(tensor, nn.Parameter):
                        _put_state(optimizer, tensor, name, arrays)

    if layers:
        checkpoint.load_together(layers[0].mixture.ranks, path, put)


def _put_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, arrays: dict[str, Array]) -> None:
    state = {
        key: _own(arrays[f"{name}/{own}"], parameter).to(parameter.dtype)
        for key, own in _MOMENTS.items()
        if f"{name}/{own}" in arrays
    }
    if f"{name}/{checkpoint.UPDATE}" in arrays:  # as Keras' SGD keeps it
        group = next(one for one in optimizer.param_groups if any(each is parameter for each in one["params"]))
        found = checkpoint.momentum(arrays, name, checkpoint.MOMENTUM, float(group["lr"]))
        state["momentum_buffer"] = _own(found, parameter).to(parameter.dtype)
    if "exp_avg" in state:
        state[_STEP] = torch.tensor(float(arrays[f"{name}/{_STEP}"]))
    if state:
        optimizer.state[parameter].update(state)


def _layers(model: nn.Module) -> list[MoE]:
    if isinstance(model, Staged):
        raise UsageError("experts of a pipeline are on several ranks: save what pipe.gather_state_dict() returns")
    return [module for module in model.modules() if isinstance(module, MoE)]


def _named(layer: MoE) -> Iterator[tuple[str, Any]]:
    yield "router", layer.router.weight
    for place, parameter in enumerate(layer.experts.parameters()):
        yield f"experts.{place}", parameter
    if layer.shared is not None:
        for place, parameter in enumerate(layer.shared.parameters()):
            yield f"shared.{place}", parameter
    if layer.expert_bias is not None:
        yield "expert_bias", layer.expert_bias


def _whole(value: Tensor, parameter: Tensor) -> Array:
    shard, array = shard_of(parameter), array_of(on_host(value))
    return array.copy() if shard is None else shard.whole(array)


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    shard = shard_of(parameter)
    return tuple(parameter.shape) if shard is None else shard.sharding.shape


def _own(whole: Array, parameter: Tensor) -> Tensor:
    shard = shard_of(parameter)
    return to_tensor(whole.copy() if shard is None else shard.own(whole))
