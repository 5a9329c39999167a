"""Step hooks: record the optimizers that make a step, and call methods after an update of a parameter.

The states that a recorded optimizer has of experts move with the experts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


@functools.cache
def watch_steps() -> None:
    """Record optimizers that make a step, from now on."""
    register_optimizer_step_pre_hook(_note)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _seen:
        _seen[optimizer] = max(_seen.values(), default=0) + 1


def keepers_of(parameter: Tensor, given: Optimizer | None) -> list[Optimizer]:
    """Return the optimizers that have states of a parameter, in the order of their first steps.

    given: an optimizer that may not have made a step yet.
    """
    keepers = sorted(_seen, key=lambda one: _seen[one])
    if given is not None and given not in _seen:
        keepers.append(given)
    return [one for one in keepers if parameter in one.state]


_methods: MutableMapping[Tensor, weakref.WeakMethod[Callable[[], None]]] = WeakIdKeyDictionary()
"""By parameter; an attribute of the parameter would be pickled with it."""


def call_after_step(parameter: Tensor, method: Callable[[], None]) -> None:
    """Call a method of the parameter's module after each step of an optimizer that has the parameter."""
    if parameter not in _methods:
        _methods[parameter] = weakref.WeakMethod(method)
        _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            method = _methods.get(parameter)
            if method is not None and (call := method()) is not None:
                call()
