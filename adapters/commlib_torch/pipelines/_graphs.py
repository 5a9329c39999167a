"""Graphs: let gradients of a batch go on, once, into what its x and y were computed of outside of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Graphs:
    """The tensors of a batch that want gradients, and leaves that take their places while it runs.

    Each microbatch goes back through what is its own; a graph that all have in common can be gone through once only.

        graphs = Graphs()
        x = graphs.apart(x); ...; graphs.go_on()
    """

    def __init__(self) -> None:
        self.origins: list[Tensor] = []
        """What was given."""
        self._leaves: list[Tensor] = []

    def apart(self, value: Any) -> Any:
        """Return a value, or a nest of containers, whose tensors that want gradients are leaves."""
        if isinstance(value, Tensor):
            return self._leaf(value)
        if value is None or not any(isinstance(one, Tensor) and one.requires_grad for one in pytree.tree_leaves(value)):
            return value
        return pytree.tree_map_only(Tensor, self._leaf, value)

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self.origins.append(tensor)
        self._leaves.append(leaf)
        return leaf

    def go_on(self) -> None:
        """Give what was given the gradients that the microbatches have added up."""
        found = [
            (one, leaf.grad) for one, leaf in zip(self.origins, self._leaves, strict=True) if leaf.grad is not None
        ]
        if found:
            torch.autograd.backward([one for one, _ in found], [gradient for _, gradient in found])
