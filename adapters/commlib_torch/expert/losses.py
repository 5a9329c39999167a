"""Losses of routers: each layer keeps those of its forwards until they are taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MANY = 16


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

    def keep(self, loss: Tensor) -> None:
        """Keep the loss of a forward. One that is computed again, in a backward, was kept the first time."""
        if not loss.requires_grad or torch._C._current_graph_task_id() != -1:
            return
        self.losses.append(loss)
        if len(self.losses) == _MANY:
            warnings.warn(
                f"the losses of {_MANY} forwards of a router were not taken: add auxiliary_loss(model) to the loss, or "
                "give Experts(balance='none', z_weight=0)",
                stacklevel=3,
            )
            self.losses.clear()  # with what their gradients need


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

    Add it to the loss of these forwards, before that is divided by accumulation steps or scaled. Not collective.
    """
    found = taken(keepers_in(model))
    return torch.zeros(()) if found is None else found
