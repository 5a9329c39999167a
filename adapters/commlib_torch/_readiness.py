"""Readiness: refuse models and losses that cannot be split or sharded as they are, with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from commlib.arguments import describe_type
from commlib.errors import UsageError
from commlib_torch._graph_breaks import unwrap_compiled


def check_module(call: str, model: Any) -> None:
    """Raise UsageError unless `model` is a module. call: its name, for errors."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{call}: expected an nn.Module, got {describe_type(model)}")


def check_ready(model: Any) -> None:
    """Raise UsageError for a model that is compiled or a script, or has weights without shapes."""
    if unwrap_compiled(model) is not model:
        kind = type(unwrap_compiled(model)).__name__
        raise UsageError(
            f"pipeline: the model is a compiled {kind} (torch.compile), which no stage would call in full: pass the "
            f"original {kind}, and compile its layers separately: layer.compile()"
        )
    for name, layer in _layers(model):
        what = f"layer {name}" if name else "the model"
        if isinstance(layer, torch.jit.ScriptModule):
            kind = getattr(layer, "original_name", type(layer).__name__)
            raise UsageError(
                f"pipeline: {what} is a script of a {kind} (torch.jit), which hides its layers and operations: pass "
                f"the original {kind}, and compile layers separately: layer.compile()"
            )
    check_shapes(model, "pipeline", "a pipeline")


def check_shapes(model: Any, call: str, caller: str) -> None:
    """Raise UsageError for a model with weights that have no shapes yet."""
    for name, layer in _layers(model):
        if lazy := _lazy(layer):
            what = f"layer {name}" if name else "the model"
            raise UsageError(
                f"{call}: {what} ({type(layer).__name__}) is lazy: its {lazy} get their shapes from a first batch, "
                f"and {caller} needs them earlier: run the model once, with the same seed on every rank, such as with "
                "torch.no_grad(): model(x[:2])"
            )


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that is not callable, is a class, or has weights without shapes."""
    if loss is None:
        return
    such_as = "such as torch.nn.functional.mse_loss or torch.nn.MSELoss()"
    if not callable(loss):
        raise UsageError(
            f"pipeline: loss= is {loss!r} ({type(loss).__name__}): pass a function of (output, target), {such_as}"
        )
    if isinstance(loss, type):
        raise UsageError(
            f"pipeline: loss= is the class {loss.__name__}: pass an instance of it, {loss.__name__}(...), or a "
            f"function of (output, target), {such_as}"
        )
    while isinstance(loss, partial):
        loss = loss.func
    for name, layer in _layers(unwrap_compiled(getattr(loss, "__self__", loss))):
        if lazy := _lazy(layer):
            what = f"layer {name} of the loss" if name else "the loss"
            raise UsageError(
                f"pipeline: {what} ({type(layer).__name__}) is lazy: its {lazy} get their shapes from a first batch, "
                "and a pipeline needs them earlier: call the loss once, with the same seed on every rank, such as "
                "with torch.no_grad(): loss(output[:2], y[:2])"
            )


def _lazy(layer: nn.Module) -> str:
    """Return the names of weights without shapes."""
    weights = [*layer._parameters.items(), *layer._buffers.items()]
    return " and ".join(own for own, weight in weights if weight is not None and is_lazy(weight))


def _layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
    elif isinstance(model, list | tuple):
        for place, layer in enumerate(model):
            if isinstance(layer, nn.Module):
                yield from layer.named_modules(prefix=str(place))
