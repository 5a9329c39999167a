"""save_experts, load_experts: files for any number of ranks, and for Keras: see `commlib.expert.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import checkpoint
from commlib_torch._shards import shard_of
from commlib_torch.expert._optimizer_states import OptimizerStates, gather_full, take_shard
from commlib_torch.expert.moe import MoE
from commlib_torch.expert.rebalance import mixtures_of
from commlib_torch.pipelines._stage_module import StageModule


def save_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the mixtures of experts of a model to a file, with their optimizer states.

    Experts have their global numbers in it. Collective; the first rank writes.

        ct.save_experts("run/experts", model, optimizer)

    Args:
        path: The file.
        model: The model with mixtures of experts.
        optimizer: Its optimizer; None: weights only.

    Raises:
        UsageError: For a model without mixtures; on all ranks for optimizer states that are neither per element nor one
            number per parameter.
        MismatchError: If ranks have different kinds of state.
    """
    layers = _layers("save_experts", model)
    ranks = layers[0].mixture.ranks
    checkpoint.save_together(ranks, path, lambda: _parts(layers, OptimizerStates("save_experts", optimizer)))


def _parts(layers: Sequence[MoE], states: OptimizerStates) -> list[checkpoint.ArrayMakers]:
    """Return functions that make the arrays of each layer, by name; most are collective."""
    parts_by_layer = []
    for layer in layers:
        parts: checkpoint.ArrayMakers = {}
        for name, tensor in _named_layers(layer):
            parts[name] = partial(gather_full, tensor, tensor)
            for key, value in states.of(name, tensor).items():
                parts[f"{name}/{key}"] = partial(gather_full, value, tensor)
        parts_by_layer.append(parts)
    return parts_by_layer


def load_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a file that `save_experts` of either framework has written: each rank takes its shards. Collective.

    From Keras' files an optimizer loads the states of Adam, AdamW and SGD.

        ct.load_experts("run/experts", model, optimizer)

    Args:
        path: The file.
        model: The model with mixtures of experts.
        optimizer: Its optimizer; None: weights only.

    Raises:
        UsageError: On all ranks for a model without mixtures, for another model, for another optimizer's states, or for
            other settings; the model is then unchanged.
    """
    layers = _layers("load_experts", model)
    titles = [layer.mixture.name for layer in layers]

    def find(read: list[dict[str, Array]]) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        named, states = [list(_named_layers(layer)) for layer in layers], OptimizerStates("load_experts", optimizer)
        checkpoint.check(read, [{name: _whole_shape(tensor) for name, tensor in each} for each in named], titles)
        if optimizer is not None:
            slots = [
                {name: states.keeps(tensor, checkpoint.optimizer_names(arrays, name)) for name, tensor in each}
                for arrays, each in zip(read, named, strict=True)
            ]
            checkpoint.check_states(read, slots, states.name, titles)
        return [
            (tensor, take_shard(arrays[name], tensor), {} if optimizer is None else states.read(arrays, name, tensor))
            for arrays, each in zip(read, named, strict=True)
            for name, tensor in each
        ]

    loaded = checkpoint.load_together(layers[0].mixture.ranks, path, find)
    states = OptimizerStates("load_experts", optimizer)
    with torch.no_grad():
        for tensor, value, slots in loaded:
            tensor.copy_(value)
            states.put(tensor, slots)


def _layers(verb: str, model: nn.Module) -> list[MoE]:
    if isinstance(model, StageModule):
        raise UsageError("experts of a pipeline are on several ranks: save the result of pipe.gather_state_dict()")
    return mixtures_of(verb, model)


def _named_layers(layer: MoE) -> Iterator[tuple[str, Any]]:
    for name, parameter in layer.router.named_parameters():
        yield "router" if name == "weight" else f"router.{name}", parameter
    for place, parameter in enumerate(layer.experts.parameters()):
        yield f"experts.{place}", parameter
    if layer.shared is not None:
        for place, parameter in enumerate(layer.shared.parameters()):
            yield f"shared.{place}", parameter
    if layer.expert_bias is not None:
        yield "expert_bias", layer.expert_bias


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    shard = shard_of(parameter)
    return tuple(parameter.shape) if shard is None else shard.sharding.shape
