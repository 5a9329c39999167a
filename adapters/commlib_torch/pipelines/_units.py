"""Units: represent any model as a sequence of units for stages, and measure the cost of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from commlib.errors import UsageError
from commlib.pipeline.choice import check_example
from commlib.pipeline.recompute import Recompute
from commlib.pipeline.schedule.auto import LayerCosts
from commlib_torch.pipelines._batches import arguments
from commlib_torch.pipelines._containers import is_container
from commlib_torch.pipelines._layer_costs import layer_costs
from commlib_torch.pipelines._parts import Layers, Units
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
        got = f"a list of {', '.join(kinds)}" if kinds else type(model).__name__
        raise UsageError(f"pipeline: expected an nn.Module or a list of them, got {got}")
    return model


def costs_of(units: Units, example: Any, recompute: Recompute) -> LayerCosts:
    """Return the cost of each unit on this rank."""
    costs = layer_costs(units.cut([1] * len(units.sizes())), arguments(check_example(example)))
    return replace(costs, keeps_inputs=recompute == "full")
