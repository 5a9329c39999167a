"""Losses whose gradients wait: re-entrant checkpointing computes a forward twice, first without gradients.

What is kept of the first time is a leaf, to which the gradient of the loss comes; the second time, within the backward,
it goes on from there. `torch.utils.checkpoint` of other kinds needs nothing of that: the first time has gradients.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils import checkpoint

from commlib.errors import UsageError

_MARK = "commlib_waiting"
_FORWARD = checkpoint.CheckpointFunction.forward.__code__
_BACKWARD = checkpoint.CheckpointFunction.backward.__code__


class Waiting:
    """The gradient of a loss, on its way to the forward that computes it again. what: whose loss it is."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._gradient: Tensor | None = None
        self.is_spent = False
        """Whether it was computed again."""

    def loss(self, value: Tensor) -> Tensor:
        """Return the loss that is kept."""
        found = value.detach().clone().requires_grad_()
        found.register_hook(self._come)
        setattr(found, _MARK, self)
        return found

    def take(self) -> float:
        """Return the gradient, for the forward that computes the loss again; 0 if none has come."""
        found, self._gradient, self.is_spent = self._gradient, None, True
        return 0.0 if found is None else float(found)

    def _come(self, gradient: Tensor) -> None:
        if self._gradient is None:
            Variable._execution_engine.queue_callback(self._check)
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def _check(self) -> None:
        if self._gradient is not None:
            self._gradient = None
            raise UsageError(
                f"{self._what}: its router's loss went backward after the layer's output, or without it: with "
                "torch.utils.checkpoint(use_reentrant=True) both must be in one backward: give use_reentrant=False"
            )


def waiting_of(loss: Tensor) -> Waiting | None:
    """Return what a loss waits with, if it was kept without gradients."""
    found: Waiting | None = getattr(loss, _MARK, None)
    return found


def is_again() -> bool:
    """Return whether this is computed within a backward: then it was computed before."""
    return torch._C._current_graph_task_id() != -1


def checkpoints() -> tuple[Any, Any]:
    """Return the re-entrant checkpoint that computes again here, and the one that will; None where there is none."""
    again = later = None
    if torch.is_grad_enabled() and not is_again():
        return again, later
    frame = sys._getframe(1)
    while frame is not None and again is None:
        if frame.f_code is _FORWARD:
            later = frame.f_locals["ctx"]  # the outermost, since those within it compute nothing again by themselves
        elif frame.f_code is _BACKWARD:
            again = frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return again, later if later is not None and later.next_functions else None


def within_checkpoint() -> bool:
    """Return whether one of torch's checkpoints, of either kind, computes here."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Recalled:
    """What the losses of one layer wait with, in the order of its calls within a checkpoint."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self._next = 0

    def add(self, waiting: Waiting) -> None:
        """Add that of one more call."""
        self._waiting.append(waiting)

    def next(self) -> Waiting | None:
        """Return that of the next call that is computed again; after the last one the first, if all are once more."""
        if not self._waiting:
            return None
        found = self._waiting[self._next]
        self._next = (self._next + 1) % len(self._waiting)
        return found


def recalled(ctx: Any, layer: Any) -> Recalled:
    """Return what the losses of a layer wait with until a checkpoint computes them again."""
    if not hasattr(ctx, _MARK):
        setattr(ctx, _MARK, {})
    found: Recalled = getattr(ctx, _MARK).setdefault(id(layer), Recalled())
    return found
