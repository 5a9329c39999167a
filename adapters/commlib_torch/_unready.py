"""Unready: refuse models that no stage can be made of as they are, and say what makes them ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from commlib.errors import UsageError


def check_ready(model: Any) -> None:
    """Raise UsageError for a model that was compiled as a whole, or whose weights have no shapes yet."""
    if isinstance(model, nn.Module) and isinstance(getattr(model, "_orig_mod", None), nn.Module):
        kind = type(model._orig_mod).__name__
        raise UsageError(
            f"pipeline: the model is a compiled {kind} (torch.compile), which no stage would call as a whole: give the "
            f"{kind} itself, and compile its layers, each by itself: layer.compile()"
        )
    for name, layer in _layers(model):
        weights = [*layer._parameters.items(), *layer._buffers.items()]
        if lazy := [own for own, weight in weights if weight is not None and is_lazy(weight)]:
            raise UsageError(
                f"pipeline: layer {name} ({type(layer).__name__}) is lazy: its {' and '.join(lazy)} get their shapes "
                "from a first batch, which a pipeline needs before: run the model once, with the same seed on every "
                "rank, such as with torch.no_grad(): model(x[:2])"
            )


def _layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
    elif isinstance(model, list | tuple):
        for place, layer in enumerate(model):
            if isinstance(layer, nn.Module):
                yield from layer.named_modules(prefix=str(place))
