"""Hooks: tell whether a forward has registered something that its backward calls, and that must be called once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from commlib.tensor_parallel.recording import replaced


class Registrations:
    """Counts what is registered with autograd's graphs within `counting`, but for what this package registers.

    Autograd does not tell which hooks a graph has. But it numbers all of tensors, of modules and of nodes as they are
    registered; those that keep a gradient (`retain_grad`), or change what is saved for backward as checkpointing does,
    have no number, and are counted here.
    """

    def __init__(self) -> None:
        self._others = 0
        self._own = 0

    @property
    def count(self) -> int:
        """How many there have been so far."""
        return RemovableHandle.next_id + self._others - self._own

    def register(self, register: Callable[[Any], Any], hook: Any) -> Any:
        """Register a hook of this package's own, which does not count."""
        self._own += 1
        return register(hook)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what has no number, too."""
        with (
            replaced(Tensor, "retain_grad", self._counted(Tensor.retain_grad)),
            replaced(saved_tensors_hooks, "__enter__", self._counted(saved_tensors_hooks.__enter__)),
        ):
            yield

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            self._others += 1
            return method(*args)

        return call


registrations = Registrations()
"""torch numbers the hooks of a process, so this is one per process too."""


def have_hooks(parameters: Iterable[Tensor], *, but_of: str) -> bool:
    """Return whether some have hooks: one of several parameters at once is called once in a backward.

    but_of: the module whose own are none.
    """
    return any(
        getattr(hook, "__module__", "") != but_of
        for parameter in parameters
        for hook in (getattr(parameter, "_backward_hooks", None) or {}).values()
    )


def calls_backward(node: Any) -> bool:
    """Return whether a node of a graph runs a backward of its own: re-entrant checkpointing, which takes no inputs=."""
    return isinstance(node, torch.autograd.function.BackwardCFunction) and "CheckpointFunction" in type(node).__name__
