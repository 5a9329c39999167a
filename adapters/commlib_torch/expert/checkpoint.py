"""save_experts, load_experts: files that any number of ranks, and Keras, can read: see `commlib.expert.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.expert import checkpoint
from commlib_torch._shards import shard_of
from commlib_torch.expert._states import States, own, whole
from commlib_torch.expert.moe import MoE
from commlib_torch.pipelines._staged import Staged


def save_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the mixtures of experts of a model to a file, with all that an optimizer keeps for them.

    Experts are in it by their global numbers. Collective; the first rank writes. Raises UsageError on all ranks for
    what an optimizer keeps neither for each element of a parameter nor for the whole of it; MismatchError if ranks keep
    different things.

        ct.save_experts("run/experts", model, optimizer)
    """
    layers = _layers(model)
    if not layers:
        return
    ranks = layers[0].mixture.ranks
    parts = checkpoint.agreed(ranks, "save_experts", lambda: _parts(layers, States("save_experts", optimizer)))
    checkpoint.write(ranks, path, [{name: part() for name, part in layer.items()} for layer in parts])


def _parts(layers: Sequence[MoE], states: States) -> list[dict[str, Callable[[], Array]]]:
    """Return what makes the arrays of each layer, by their names; most are collective to make."""
    found = []
    for layer in layers:
        parts: dict[str, Callable[[], Array]] = {}
        for name, tensor in _named(layer):
            parts[name] = partial(whole, tensor, tensor)
            for key, kept in states.of(name, tensor).items():
                parts[f"{name}/{key}"] = partial(whole, kept, tensor)
        found.append(parts)
    return found


def load_experts(path: checkpoint.Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what `save_experts` of either framework has written: each rank takes its part. Collective.

    Of Keras' files an optimizer takes what Adam, AdamW and SGD keep. Raises UsageError on all ranks for another model,
    or for what another optimizer kept, or the same with other settings; all is as it was then.

        ct.load_experts("run/experts", model, optimizer)
    """
    layers = _layers(model)
    if not layers:
        return

    def find(read: list[dict[str, Array]]) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        named, states = [list(_named(layer)) for layer in layers], States("load_experts", optimizer)
        checkpoint.check(read, [{name: _whole_shape(tensor) for name, tensor in each} for each in named])
        if optimizer is not None:
            kept = [
                {name: states.keeps(tensor, checkpoint.of_optimizer(arrays, name)) for name, tensor in each}
                for arrays, each in zip(read, named, strict=True)
            ]
            checkpoint.check_states(read, kept, states.name)
        return [
            (tensor, own(arrays[name], tensor), {} if optimizer is None else states.read(arrays, name, tensor))
            for arrays, each in zip(read, named, strict=True)
            for name, tensor in each
        ]

    found = checkpoint.load_together(layers[0].mixture.ranks, path, find)
    states = States("load_experts", optimizer)
    with torch.no_grad():
        for tensor, value, kept in found:
            tensor.copy_(value)
            states.put(tensor, kept)


def _layers(model: nn.Module) -> list[MoE]:
    if isinstance(model, Staged):
        raise UsageError("experts of a pipeline are on several ranks: save what pipe.gather_state_dict() returns")
    return [module for module in model.modules() if isinstance(module, MoE)]


def _named(layer: MoE) -> Iterator[tuple[str, Any]]:
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
