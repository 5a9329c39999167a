"""Losses of routers: each layer keeps those of its forwards until they are taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch.expert._waiting import Waiting, checkpoints, is_again, recalled, waiting_of, within_checkpoint

_MANY = 256


class _Losses(list[Tensor]):
    """Those of one layer; a copy of the layer has none of them."""

    def __deepcopy__(self, memo: Any) -> _Losses:
        return _Losses()


class KeepsLosses(nn.Module):
    """A layer that has a loss of its own in training, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = _Losses()
        """Of the forwards since they were taken."""
        self._has_skipped = False
        """Whether a forward in training had no gradients, and its loss was not kept."""

    def keep(self, loss: Tensor) -> None:
        """Keep the loss of a forward. One that is computed again, in a backward, was kept the first time.

        Where what it is made of is frozen it has no gradient, and is kept as well, unless there are none at all.
        Raises UsageError within a re-entrant checkpoint, where it has no gradient.
        """
        if is_again():
            self._look_at_recomputation()
        elif loss.requires_grad:
            self._add(loss)
        elif self.training and checkpoints()[1] is not None:
            raise UsageError(
                f"{self._title}: a loss that a layer keeps has no gradient within "
                "torch.utils.checkpoint(use_reentrant=True): give use_reentrant=False"
            )
        elif torch.is_grad_enabled():
            self._add(loss)

    def keep_or_wait(self, value: Tensor, waiting: Waiting | None) -> None:
        """Keep the loss of a forward, whichever checkpoint it is in. waiting: what `recalled` returned before it."""
        later = checkpoints()[1]
        if later is None:
            if waiting is not None and not value.requires_grad:
                waiting.take()  # what would use it has no gradient
            if not torch.is_grad_enabled() and not is_again():
                self._has_skipped = True
            self.keep(value)
            return
        if waiting is None and is_again():
            return  # for another checkpoint around that one, which wants what this saves and no more
        if waiting is None:
            waiting = Waiting(self._title)
            self._add(waiting.loss(value))
        recalled(later, self).add(waiting)

    def recalled(self) -> Waiting | None:
        """Return what the loss of this forward has been waiting with, if re-entrant checkpointing computes it again."""
        again = checkpoints()[0]
        return None if again is None else recalled(again, self).next()

    @property
    def _title(self) -> str:
        return type(self).__name__

    def _add(self, loss: Tensor) -> None:
        spent = 0
        while spent < len(self.losses) and _is_spent(self.losses[spent]):
            spent += 1
        lost = self.losses[:spent]
        if any(one.requires_grad for one in lost):
            warnings.warn(
                f"{self._title}: a backward went through forwards without the losses of their routers, which have no "
                "effect then: add auxiliary_loss(model) to the loss before its backward, or give "
                "Experts(balance='none', z_weight=0)",
                stacklevel=4,
            )
            self.losses[:spent] = [torch.stack([one.detach() for one in lost]).sum()]
        self.losses.append(loss)
        if len(self.losses) == _MANY:
            warnings.warn(
                f"{self._title}: the losses of {_MANY} forwards wait for auxiliary_loss(model), and each keeps what "
                "its gradient needs: take them, or call model.eval() if this is no training",
                stacklevel=4,
            )

    def _look_at_recomputation(self) -> None:
        if self._has_skipped and not within_checkpoint():
            self._has_skipped = False
            warnings.warn(
                f"{self._title}: a forward without gradients is computed again in the backward, by other means than "
                "torch.utils.checkpoint: the loss of its router was not kept, and has no effect",
                stacklevel=4,
            )


def _is_spent(loss: Tensor) -> bool:
    """Return whether a loss has no gradient, or can have none any more: what that needs is freed."""
    waiting = waiting_of(loss)
    if waiting is not None:
        return waiting.is_spent
    return not loss.requires_grad or getattr(loss.grad_fn, "is_spent", False)


def keepers_in(model: nn.Module) -> list[KeepsLosses]:
    """Return the layers of a model that have losses of their own."""
    return [module for module in model.modules() if isinstance(module, KeepsLosses)]


def each_taken(layers: Sequence[KeepsLosses]) -> list[Tensor]:
    """Return the losses that layers have kept; they keep them no more."""
    found = [loss for layer in layers for loss in layer.losses]
    for layer in layers:
        layer.losses.clear()
    return found


def taken(layers: Iterable[KeepsLosses]) -> Tensor | None:
    """Return the sum of the losses that layers have kept, None if there are none; they keep them no more."""
    found = each_taken(list(layers))
    return torch.stack(found).sum() if found else None


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of the routers' weighted losses of all forwards since it was last called; 0 if there are none.

    Add it to the loss of these forwards, before that is divided by accumulation steps or scaled. It is this rank's
    share: the mean over ranks, as which gradients are reduced, is the loss, of balance="global", too. Not collective.
    """
    found = taken(keepers_in(model))
    return torch.zeros(()) if found is None else found
