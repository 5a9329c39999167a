"""Hooks of autograd: who hears when a parameter's gradient is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Listener(Protocol):
    """Hears of gradients, by the numbers of their parameters."""

    def on_gradient(self, index: int, parameter: Tensor) -> None: ...

    def before_gradient(self, index: int) -> None: ...


def listen(listener: Listener, parameters: Sequence[Tensor], *, before: bool) -> list[Any]:
    """Call `on_gradient` after each accumulation of a gradient, and `before_gradient` too if that is wanted.

    Returns handles to remove the hooks by. A parameter does not keep its listener alive.
    """
    reference = weakref.ref(listener)

    def after_accumulation(index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            listener = reference()
            if listener is not None:
                listener.on_gradient(index, parameter)

        return hook

    def before_accumulation(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            listener = reference()
            if listener is not None:
                listener.before_gradient(index)

        return hook

    handles: list[Any] = []
    for index, parameter in enumerate(parameters):
        handles.append(parameter.register_post_accumulate_grad_hook(after_accumulation(index)))
        if before:
            handles.append(parameter.register_hook(before_accumulation(index)))
    return handles
