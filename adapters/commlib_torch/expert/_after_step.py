"""Call methods once an optimizer has updated a parameter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_MARK = "commlib_after_step"


def call_after_step(parameter: Tensor, method: Callable[[], None]) -> None:
    """Let a method of the parameter's module be called after each step of an optimizer that has the parameter."""
    if not hasattr(parameter, _MARK):
        setattr(parameter, _MARK, weakref.WeakMethod(method))
        _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            method = getattr(parameter, _MARK, None)
            if method is not None and (call := method()) is not None:
                call()
