"""Pending gradients: re-entrant checkpointing computes a forward twice, first without autograd.

The loss of the first forward is a leaf, which receives the gradient; the second forward, within the backward, continues
from it. Other checkpoints of `torch.utils.checkpoint` do not need this: their first forward has gradients.
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


class PendingGradient:
    """The gradient of a loss, for the forward that computes it again. what: the owner of the loss."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._gradient: Tensor | None = None
        self.is_spent = False
        """Whether the loss was computed again."""

    def loss(self, value: Tensor) -> Tensor:
        """Return the loss of the first forward."""
        detached = value.detach().clone().requires_grad_()
        detached.register_hook(self._receive)
        setattr(detached, _MARK, self)
        return detached

    def take(self) -> float:
        """Return the gradient, for the forward that computes the loss again; 0 if none has arrived."""
        gradient, self._gradient, self.is_spent = self._gradient, None, True
        return 0.0 if gradient is None else float(gradient)

    def _receive(self, gradient: Tensor) -> None:
        if self._gradient is None:
            Variable._execution_engine.queue_callback(self._check)
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def _check(self) -> None:
        if self._gradient is not None:
            self._gradient = None
            raise UsageError(
                f"{self._what}: the backward of its router's loss ran after the backward of the layer's output, or "
                "without it: with torch.utils.checkpoint(use_reentrant=True) both must be in one backward: pass "
                "use_reentrant=False"
            )


def pending_of(loss: Tensor) -> PendingGradient | None:
    """Return the pending gradient of a loss from a forward without autograd; otherwise None."""
    pending: PendingGradient | None = getattr(loss, _MARK, None)
    return pending


def is_recomputing() -> bool:
    """Return whether a forward runs within a backward, which means it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def checkpoints() -> tuple[Any, Any]:
    """Return the re-entrant checkpoint that recomputes now, and the one that will; None if there is none."""
    again = later = None
    if torch.is_grad_enabled() and not is_recomputing():
        return again, later
    frame = sys._getframe(1)
    while frame is not None and again is None:
        if frame.f_code is _FORWARD:
            later = frame.f_locals["ctx"]  # the outermost: inner ones do not recompute by themselves
        elif frame.f_code is _BACKWARD:
            again = frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return again, later if later is not None and later.next_functions else None


def is_in_checkpoint() -> bool:
    """Return whether code runs in one of torch's checkpoints, of either kind."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class PendingGradients:
    """The pending gradients of one layer's losses, in the order of its calls within a checkpoint."""

    def __init__(self) -> None:
        self._waiting: list[PendingGradient] = []
        self._next = 0

    def add(self, waiting: PendingGradient) -> None:
        """Add the pending gradient of one more call."""
        self._waiting.append(waiting)

    def next(self) -> PendingGradient | None:
        """Return the gradient of the next recomputed call; after the last call it starts over."""
        if not self._waiting:
            return None
        pending = self._waiting[self._next]
        self._next = (self._next + 1) % len(self._waiting)
        return pending


def recall(ctx: Any, layer: Any) -> PendingGradients:
    """Return the pending gradients of a layer's losses, for a checkpoint that will recompute them."""
    if not hasattr(ctx, _MARK):
        setattr(ctx, _MARK, {})
    pending: PendingGradients = getattr(ctx, _MARK).setdefault(id(layer), PendingGradients())
    return pending
