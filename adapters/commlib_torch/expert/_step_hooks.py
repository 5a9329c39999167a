"""Step hooks: call methods after an optimizer has updated a parameter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

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
