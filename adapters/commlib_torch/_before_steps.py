"""Before any optimizer steps: refuse gradients that should have been reduced, and were not.

A DataParallel has no part in the optimizer, and reduces what backward makes. A gradient that was put into `.grad` by
hand, or is of a parameter that came when nobody looked, would let ranks part without a word. So would an optimizer that
steps in a hook, before a gradient is reduced.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Stepped(Protocol):
    """Looks at the gradients that an optimizer is about to use."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class BeforeSteps:
    """Lets its members look before each step of any optimizer of this process."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_listening = False

    def join(self, member: Stepped) -> None:
        """Add a member, as long as it lives."""
        if not self._is_listening:
            self._is_listening = True
            register_optimizer_step_pre_hook(self._look)
        self._members.add(member)

    def leave(self, member: Stepped) -> None:
        """Remove a member."""
        self._members.discard(member)

    def _look(self, optimizer: Any, *_: Any) -> None:
        for member in list(self._members):
            member.before_step(optimizer)


before_steps = BeforeSteps()
"""torch has one list of hooks of all optimizers, so this is one per process too."""


def with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer is about to change."""
    groups = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
