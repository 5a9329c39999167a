"""Checks before any optimizer step: refuse gradients that should have been reduced but were not.

A DataParallel does not own the optimizer, and reduces the gradients of backward. A gradient that was put into `.grad`
by hand, or that belongs to a parameter added later, would let ranks diverge silently. The same holds for an optimizer
that steps in a hook, before the gradient is reduced.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepCheck(Protocol):
    """Checks the gradients that an optimizer is about to use."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class StepChecks:
    """Calls its members before each step of any optimizer of this process."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_listening = False

    def join(self, member: StepCheck) -> None:
        """Add a member, held by a weak reference."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_pre_hook(self._look)
        self._members.add(member)

    def leave(self, member: StepCheck) -> None:
        """Remove a member."""
        self._members.discard(member)

    def _look(self, optimizer: Any, *_: Any) -> None:
        for member in list(self._members):
            member.before_step(optimizer)


before_steps = StepChecks()
"""One per process: torch keeps one list of hooks for all optimizers."""


def parameters_to_update(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer is about to change."""
    groups = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
