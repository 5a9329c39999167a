"""Trial runs: run a PyTorch model once more, on copies of its arguments, without side effects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commlib.expert.mixture import Mixture
from commlib.expert.stats import RoutingCounter
from commlib.snapshot.object_snapshot import ObjectSnapshot
from commlib.snapshot.snapshot_kinds import snapshot_attributes
from commlib.snapshot.trial_run import run_trial as unnoticed_by


@contextmanager
def preserve_model(model: Any, *given: Any) -> Iterator[None]:
    """Restore a model, its arguments, and the random states at the end of the context.

    Assumes that a forward does not write parameters.
    """
    with (
        torch.random.fork_rng(),
        _hide_saved_tensors(),
        _disable_cast_cache(),
        unnoticed_by((model,), _save_state, given),
    ):
        yield


@contextmanager
def _disable_cast_cache() -> Iterator[None]:
    """Disable autocast's cache within the context: weights may be replaced temporarily."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _hide_saved_tensors() -> Iterator[None]:
    """Hide saved tensors from existing hooks within the context: a checkpoint counts them."""
    if _hooks_of_saved(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        yield


_hooks_of_saved: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignores_tracing: None
)
"""Returns the active saved-tensor hooks; None if there are none."""


def copy_arguments(value: Any) -> Any:
    """Return the arguments with copies of their tensors, in nested tuples, lists and dicts."""
    return map_leaves(value, _copy_leaf)


def _copy_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone()
    return copied.requires_grad_() if value.requires_grad else copied


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested structure with changed leaves; tuples, lists and dicts are not leaves.

    Repeated or recursive lists and dicts stay so in the result.
    """
    known: dict[int, Any] = {}

    def of(one: Any) -> Any:
        kind, mapped = type(one), known.get(id(one))
        if mapped is not None:
            return mapped
        if kind is dict:
            mapped = known[id(one)] = {}
            mapped.update((key, of(part)) for key, part in one.items())
        elif kind is list:
            mapped = known[id(one)] = []
            mapped.extend(map(of, one))
        elif kind is tuple:
            return tuple(map(of, one))
        elif isinstance(one, tuple) and hasattr(one, "_fields"):
            return kind(*map(of, one))
        return change(one) if mapped is None else mapped

    return of(value)


def _save_state(value: Any) -> ObjectSnapshot | None:
    kind = type(value)  # an object's own __class__ may be faked
    if issubclass(kind, Tensor):
        if not isinstance(value, nn.Parameter):
            return ObjectSnapshot(functools.partial(_put_back, value, value.detach().clone()))
        hooks = value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)
        return ObjectSnapshot(functools.partial(_put_back_gradient, value, value.grad), hooks)
    if issubclass(kind, nn.Module):
        own = snapshot_attributes(value)
        return ObjectSnapshot(own.restore, [*own.inside, kind.forward])
    if issubclass(kind, torch.Generator):
        return ObjectSnapshot(functools.partial(value.set_state, value.get_state()))
    if issubclass(kind, _WITH_ATTRIBUTES):
        return snapshot_attributes(value)
    return None


_WITH_ATTRIBUTES = (Mixture, RoutingCounter, torch.quasirandom.SobolEngine, torch.optim.Optimizer)
"""Types of objects, other than modules, that keep their state in attributes."""


def _put_back_gradient(parameter: nn.Parameter, before: Tensor | None) -> None:
    if parameter.grad is not before:
        parameter.grad = before


def _put_back(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != before.shape:
            tensor.data = before
        elif not torch.equal(tensor, before):  # or a value without numbers
            tensor.detach().copy_(before)
