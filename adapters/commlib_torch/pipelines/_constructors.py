"""Constructors: build the layers of this rank's stages alone, from a list of functions that make one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from commlib.errors import UsageError
from commlib_torch.pipelines._parts import Cut

Constructors = Sequence[Callable[[], nn.Module]]


def are_constructors(model: Any) -> bool:
    """Return whether a model is a list of functions, or classes, that return a layer when they are called."""
    if not isinstance(model, list | tuple) or not model:
        return False
    return all(callable(one) and not isinstance(one, nn.Module) for one in model)


def outline(constructors: Constructors) -> list[nn.Module]:
    """Return all layers without their memory, on the meta device. Raises UsageError for what returns no new layer."""
    with torch.device("meta"):
        layers = [make() for make in constructors]
    for place, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise UsageError(f"pipeline: constructor {place} returned {type(layer).__name__}, expected an nn.Module")
    if len({id(layer) for layer in layers}) < len(layers):
        raise UsageError("pipeline: two constructors returned the same layer; expected a new one from each")
    return layers


def build(constructors: Constructors, pieces: Cut, stages: Sequence[int], seed: int) -> None:
    """Put real layers into some stages of a cut outline. Each has a seed of its own, whatever other ranks build."""
    places = list(pairwise((0, *accumulate(pieces.counts))))
    with torch.random.fork_rng():
        for stage in stages:
            for place in range(*places[stage]):
                torch.manual_seed(seed + place)
                setattr(pieces.parts[stage], str(place), constructors[place]())
