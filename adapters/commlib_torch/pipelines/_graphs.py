"""Outer graphs: continue the backward of a batch, once, into the graphs that computed x and y outside the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class OuterGraphs:
    """The tensors of a batch that require gradients, and the leaves that replace them while it runs.

    Each microbatch has a backward through its own part; a graph common to all can be traversed only once.

        graphs = Graphs()
        x = graphs.apart(x); ...; graphs.go_on()
    """

    def __init__(self) -> None:
        self.origins: list[Tensor] = []
        """The original tensors."""
        self._leaves: list[Tensor] = []

    def detach(self, value: Any) -> Any:
        """Return a value, or a nest of containers, with leaves in place of tensors that require gradients."""
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

    def backward(self) -> None:
        """Run the backward of the original tensors with the gradients that the microbatches have accumulated."""
        pairs = [
            (one, leaf.grad) for one, leaf in zip(self.origins, self._leaves, strict=True) if leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
