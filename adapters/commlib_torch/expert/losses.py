"""Router losses: each layer records the losses of its forwards until they are taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib_torch.expert._pending_gradients import (
    PendingGradient,
    checkpoints,
    is_in_checkpoint,
    is_recomputing,
    pending_of,
    recall,
)

_MANY = 256


class _LayerLosses(list[Tensor]):
    """The losses of one layer; a copy of the layer has none."""

    def __deepcopy__(self, memo: Any) -> _LayerLosses:
        return _LayerLosses()


class AuxiliaryLossModule(nn.Module):
    """A layer with its own loss in training, in addition to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = _LayerLosses()
        """Losses of forwards since they were last taken."""
        self._has_skipped = False
        """Whether a forward in training ran without gradients, and its loss was not recorded."""

    def keep(self, loss: Tensor) -> None:
        """Record the loss of a forward. A recomputation in a backward was recorded the first time.

        With frozen inputs it has no gradient and is still recorded, unless gradients are disabled. Raises UsageError
        within a re-entrant checkpoint, where it has no gradient.
        """
        if is_recomputing():
            self._look_at_recomputation()
        elif loss.requires_grad:
            self._add(loss)
        elif self.training and checkpoints()[1] is not None:
            raise UsageError(
                f"{self._title}: the loss of a layer has no gradient within "
                "torch.utils.checkpoint(use_reentrant=True): pass use_reentrant=False"
            )
        elif torch.is_grad_enabled():
            self._add(loss)

    def record_in_checkpoint(self, value: Tensor, waiting: PendingGradient | None) -> None:
        """Record the loss of a forward in any checkpoint. waiting: the earlier result of `recall`."""
        later = checkpoints()[1]
        if later is None:
            if waiting is not None and not value.requires_grad:
                waiting.take()  # its user has no gradient
            if not torch.is_grad_enabled() and not is_recomputing():
                self._has_skipped = True
            self.keep(value)
            return
        if waiting is None and is_recomputing():
            return  # for an outer checkpoint, which needs the saved tensors of this
        if waiting is None:
            waiting = PendingGradient(self._title)
            self._add(waiting.loss(value))
        recall(later, self).add(waiting)

    def recalled(self) -> PendingGradient | None:
        """Return the pending gradient of this forward's loss, if re-entrant checkpointing recomputes the forward."""
        again = checkpoints()[0]
        return None if again is None else recall(again, self).next()

    @property
    def _title(self) -> str:
        return type(self).__name__

    def _add(self, loss: Tensor) -> None:
        spent = 0
        while spent < len(self.losses) and _is_spent(self.losses[spent]):
            spent += 1
        unused = self.losses[:spent]
        if any(one.requires_grad for one in unused):
            warnings.warn(
                f"{self._title}: a backward went through forwards without their router losses, which therefore have "
                "no effect: add auxiliary_loss(model) to the loss before its backward, or pass "
                "Experts(balance='none', z_weight=0)",
                stacklevel=4,
            )
            self.losses[:spent] = [torch.stack([one.detach() for one in unused]).sum()]
        self.losses.append(loss)
        if len(self.losses) == _MANY:
            warnings.warn(
                f"{self._title}: the losses of {_MANY} forwards are waiting for auxiliary_loss(model), and each keeps "
                "its graph: take them, or call model.eval() if this is not training",
                stacklevel=4,
            )

    def _look_at_recomputation(self) -> None:
        if self._has_skipped and not is_in_checkpoint():
            self._has_skipped = False
            warnings.warn(
                f"{self._title}: a forward without gradients is recomputed in the backward, but not by "
                "torch.utils.checkpoint: the loss of its router was not recorded, and has no effect",
                stacklevel=4,
            )


def _is_spent(loss: Tensor) -> bool:
    """Return whether a loss has no gradient, or its graph is freed."""
    waiting = pending_of(loss)
    if waiting is not None:
        return waiting.is_spent
    return not loss.requires_grad or getattr(loss.grad_fn, "is_spent", False)


def keepers_in(model: nn.Module) -> list[AuxiliaryLossModule]:
    """Return the layers of a model that have losses."""
    return [module for module in model.modules() if isinstance(module, AuxiliaryLossModule)]


def take_each(layers: Sequence[AuxiliaryLossModule]) -> list[Tensor]:
    """Remove and return the recorded losses of layers."""
    losses = [loss for layer in layers for loss in layer.losses]
    for layer in layers:
        layer.losses.clear()
    return losses


def take_losses(layers: Iterable[AuxiliaryLossModule]) -> Tensor | None:
    """Remove the recorded losses of layers and return their sum, None if there are none."""
    losses = take_each(list(layers))
    return torch.stack(losses).sum() if losses else None


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of the routers' weighted losses of all forwards since the last call; 0 if there are none.

    Add it to the loss of these forwards before you divide by accumulation steps or scale. It is this rank's share: the
    mean over ranks, as in gradient reduction, is the loss, also for balance="global". Not collective.

    Args:
        model: A model with mixtures of experts.
    """
    losses = take_losses(keepers_in(model))
    return torch.zeros(()) if losses is None else losses
