"""Copies of models that can run without side effects on the originals."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

_T = TypeVar("_T")

OF_MODULES = frozenset(vars(nn.Module()))

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_of(value: _T) -> _T:
    """Return a copy of a module or a nest of modules: weights, buffers, counters, lists, and all other attributes.

    It lacks the users' hooks on modules and weights, which may change the original. It has the hooks with which torch
    computes weights. Gradients are not copied.
    """
    modules = _modules_in(value)
    try:
        copied = copy.deepcopy(value, _memo(modules))
    except Exception:
        shared = {id(one): one for module in modules for one in _uncopyable(module)}
        copied = copy.deepcopy(value, _memo(modules) | shared)
    for module in _modules_in(copied):
        for name in HOOKS:
            hooks: dict[int, Any] = getattr(module, name, {})
            for key in [key for key, hook in hooks.items() if not _is_part_of_the_model(hook)]:
                del hooks[key]
    return copied


def _memo(modules: list[nn.Module]) -> dict[int, Any]:
    """Return deepcopy's memo: it excludes hooks of users, and shares values that cannot be copied."""
    memo: dict[int, Any] = {}
    for module in modules:
        for one in (*vars(module).values(), *module._buffers.values()):
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one.grad_fn is not None:
                memo[id(one)] = one.detach().clone().requires_grad_()  # torch copies only leaves
        for name in HOOKS:
            memo |= {id(hook): hook for hook in getattr(module, name, {}).values() if not _is_part_of_the_model(hook)}
    return memo


def _uncopyable(module: nn.Module) -> list[Any]:
    """Return the attributes of a module that cannot be copied, such as a lock or a file: the copy shares them."""
    paths = []
    for name, one in vars(module).items():
        if name not in OF_MODULES:
            try:
                copy.deepcopy(one)
            except Exception:
                paths.append(one)
    return paths


def _modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return list(value.modules())
    if isinstance(value, tuple | list):
        return list(dict.fromkeys(module for one in value for module in _modules_in(one)))
    return []


def _is_part_of_the_model(hook: Any) -> bool:
    made_by = getattr(hook, "__module__", None) or type(hook).__module__
    is_check = hasattr(hook, "divided_output")  # of a plan, built once
    return made_by.startswith("torch.") or (made_by.startswith("commlib_torch.") and not is_check)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the states of all random generators at the end of the context."""
    before = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def force_mode(modules: list[nn.Module], *, training: bool) -> Iterator[None]:
    """Put modules into a mode within the context, bypassing their `train`."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        vars(module)["training"] = training
    try:
        yield
    finally:
        for module, mode in before:
            vars(module)["training"] = mode
