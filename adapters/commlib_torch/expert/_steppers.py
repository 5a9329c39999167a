"""Stepped optimizers: all optimizers that have made a step; their states of experts move with the experts."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
    found = sorted(_seen, key=lambda one: _seen[one])
    if given is not None and given not in _seen:
        found.append(given)
    return [one for one in found if parameter in one.state]
