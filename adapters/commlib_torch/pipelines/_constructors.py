"""Constructors: build only the layers of this rank's stages, from a list of functions that make one layer each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from commlib.errors import UsageError
from commlib_torch.pipelines._parts import SplitModel

Constructors = Sequence[Callable[[], nn.Module]]


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
