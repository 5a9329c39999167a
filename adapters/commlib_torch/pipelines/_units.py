"""Units: represent any model as a sequence of units for stages, measure their costs, and build a rank's units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from commlib.errors import UsageError
from commlib.pipeline.choice import check_example
from commlib.pipeline.recompute import Recompute
from commlib.pipeline.schedule.auto import LayerCosts
from commlib_torch._tracer import hooks_of
from commlib_torch.pipelines._batches import arguments
from commlib_torch.pipelines._layer_costs import layer_costs
from commlib_torch.pipelines._parts import Layers, SplitModel, Units
from commlib_torch.pipelines._traced_model import TracedModel


def units_of(model: Any, ranks: int, example: Any, recompute: Recompute) -> Units:
    """Return a model as a sequence of units. example: as in `described`. Raises UsageError for invalid models."""
    if not isinstance(model, nn.Module):
        return Layers(((str(number), layer) for number, layer in enumerate(model)), spreads=True)
    if is_container(model):
        # named_children() leaves out repeated layers
        layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
        return Layers(layers, spreads=isinstance(model, nn.ModuleList), container=model)
    return TracedModel(model, ranks, example, () if isinstance(recompute, str) else recompute)


def layers_of(model: Any) -> Sequence[nn.Module]:
    """Return a list of layers. Raises UsageError for other objects."""
    if not isinstance(model, list | tuple) or not all(isinstance(layer, nn.Module) for layer in model):
        kinds = sorted({type(layer).__name__ for layer in model}) if isinstance(model, list | tuple) else []
        kind = f"a list of {', '.join(kinds)}" if kinds else type(model).__name__
        raise UsageError(f"pipeline: expected an nn.Module or a list of them, got {kind}")
    return model


def costs_of(units: Units, example: Any, recompute: Recompute) -> LayerCosts:
    """Return the cost of each unit on this rank."""
    costs = layer_costs(units.cut([1] * len(units.sizes())), arguments(check_example(example)))
    return replace(costs, keeps_inputs=recompute == "full")


def is_container(module: nn.Module) -> bool:
    """Return whether a module only calls its layers in sequence."""
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__ or hooks_of(module):
        return False
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(module, kind):  # their forward iterates over the layers
            own: Any = type(module)
            return own.forward is kind.forward and own.__iter__ is kind.__iter__
    return False


Constructors = Sequence[Callable[[], nn.Module]]
"""Functions that make one layer each; a rank calls only those of its stages."""


def are_constructors(model: Any) -> bool:
    """Return whether a model is a list of functions or classes that return a layer."""
    if not isinstance(model, list | tuple) or not model:
        return False
    return all(callable(one) and not isinstance(one, nn.Module) for one in model)


def outline(constructors: Constructors) -> list[nn.Module]:
    """Build all layers on the meta device, without memory. Raises UsageError if a function returns no new layer."""
    with torch.device("meta"):
        layers = [make() for make in constructors]
    for place, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise UsageError(f"pipeline: constructor {place} returned {type(layer).__name__}, expected an nn.Module")
    if len({id(layer) for layer in layers}) < len(layers):
        raise UsageError("pipeline: two constructors returned the same layer; expected a new one from each")
    return layers


def build(constructors: Constructors, pieces: SplitModel, stages: Sequence[int], seed: int) -> None:
    """Build real layers for some stages of an outline. Each layer has its own seed, independent of the rank."""
    places = list(pairwise((0, *accumulate(pieces.counts))))
    with torch.random.fork_rng():
        for stage in stages:
            for place in range(*places[stage]):
                torch.manual_seed(seed + place)
                setattr(pieces.parts[stage], str(place), constructors[place]())
