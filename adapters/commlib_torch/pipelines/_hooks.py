"""Hooks: find out whether a forward has registered hooks that its backward must call exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from commlib.tensor_parallel.recording import replace_attribute


class HookCounter:
    """Counts registrations with autograd graphs within `counting`, except those of this package.

    Autograd does not list the hooks of a graph. But it numbers all hooks of tensors, modules and nodes at their
    registration. Two kinds have no number and are counted here: those that keep a gradient (`retain_grad`), and those
    that change values saved for backward, as checkpointing does.
    """

    def __init__(self) -> None:
        self._others = 0
        self._own = 0

    @property
    def count(self) -> int:
        """The number of registrations so far."""
        return RemovableHandle.next_id + self._others - self._own

    def register(self, register: Callable[[Any], Any], hook: Any) -> Any:
        """Register a hook of this package, which does not count."""
        self._own += 1
        return register(hook)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Also count the registrations without a number."""
        with (
            replace_attribute(Tensor, "retain_grad", self._counted(Tensor.retain_grad)),
            replace_attribute(saved_tensors_hooks, "__enter__", self._counted(saved_tensors_hooks.__enter__)),
        ):
            yield

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            self._others += 1
            return method(*args)

        return call


registrations = HookCounter()
"""One per process: torch numbers the hooks of a process."""


def have_hooks(parameters: Iterable[Tensor], *, but_of: str) -> bool:
    """Return whether parameters have hooks: a backward of several parameters calls their hooks only once.

    but_of: ignore the hooks of this module.
    """
    return any(
        getattr(hook, "__module__", "") != but_of
        for parameter in parameters
        for hook in (getattr(parameter, "_backward_hooks", None) or {}).values()
    )


def calls_backward(node: Any) -> bool:
    """Return whether a graph node runs a nested backward: re-entrant checkpointing, which does not support inputs=."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) and "CheckpointFunction" in type(node).__name__
