"""Unnoticed: run a model of PyTorch once more, on copies of its arguments, and leave it as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commlib.expert.mixture import Mixture
from commlib.expert.stats import Counted
from commlib.snapshot.held import Held
from commlib.snapshot.holding import attributes
from commlib.snapshot.unnoticed import unnoticed as unnoticed_by


@contextmanager
def unnoticed(model: Any, *given: Any) -> Iterator[None]:
    """Leave a model, what it is called with, and the states of random generators as they were before.

    Parameters are taken for what no forward writes.
    """
    with torch.random.fork_rng(), _unsaved(), _uncast(), unnoticed_by((model,), _hold, given):
        yield


@contextmanager
def _uncast() -> Iterator[None]:
    """Let autocast keep no weights that it has cast: there may be others in their places for a while."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _unsaved() -> Iterator[None]:
    """Keep what a backward needs from hooks that are there, for a while: a checkpoint counts what passes them."""
    if _hooks_of_saved(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        yield


_hooks_of_saved: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None
)
"""Returns the hooks that tensors pass which are saved for a backward; None if there are none."""


def fresh(value: Any) -> Any:
    """Return the same arguments with copies of their tensors, in nested tuples, lists and dicts."""
    return mapped(value, _copied)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_() if value.requires_grad else copied


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested structure with other leaves, which is what is no tuple, list or dict.

    A list or dict that is there several times, or within itself, is so in the result.
    """
    known: dict[int, Any] = {}

    def of(one: Any) -> Any:
        kind, made = type(one), known.get(id(one))
        if made is not None:
            return made
        if kind is dict:
            made = known[id(one)] = {}
            made.update((key, of(part)) for key, part in one.items())
        elif kind is list:
            made = known[id(one)] = []
            made.extend(map(of, one))
        elif kind is tuple:
            return tuple(map(of, one))
        elif isinstance(one, tuple) and hasattr(one, "_fields"):
            return kind(*map(of, one))
        return change(one) if made is None else made

    return of(value)


def _hold(value: Any) -> Held | None:
    kind = type(value)  # what an object itself says is its class may be made up
    if issubclass(kind, Tensor):
        if not isinstance(value, nn.Parameter):
            return Held(functools.partial(_put_back, value, value.detach().clone()))
        hooks = value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)
        return Held(functools.partial(_put_back_gradient, value, value.grad), hooks)
    if issubclass(kind, nn.Module):
        own = attributes(value)
        return Held(own.restore, [*own.inside, kind.forward])
    if issubclass(kind, torch.Generator):
        return Held(functools.partial(value.set_state, value.get_state()))
    if issubclass(kind, _WITH_ATTRIBUTES):
        return attributes(value)
    return None


_WITH_ATTRIBUTES = (Mixture, Counted, torch.quasirandom.SobolEngine, torch.optim.Optimizer)
"""Kinds of objects, other than modules, whose state is in their attributes."""


def _put_back_gradient(parameter: nn.Parameter, before: Tensor | None) -> None:
    if parameter.grad is not before:
        parameter.grad = before


def _put_back(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != before.shape:
            tensor.data = before
        elif not torch.equal(tensor, before):  # or it has what is no number
            tensor.detach().copy_(before)
