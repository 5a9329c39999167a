"""Split a backward in two: gradients of a stage's inputs first, gradients of its weights later.

The graph of a stage has a trunk, all nodes that lead to its inputs, and branches that lead to weights only. The first
pass runs the trunk, and records the gradients at each node with a branch. The second pass runs the branches from these
nodes. If several branches ended at one weight, it would be reached from one of them along the trunk and counted twice:
such a graph is not split. Nor is one with hooks, because both passes run the nodes with branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from commlib_torch.pipelines._hooks import calls_backward, registrations

Node = Any


@dataclass(slots=True)
class _Branches:
    """The weights of the branches at one node of the trunk, and the gradients that arrived at the node."""

    node: Node
    weights: list[Tensor]
    arrived: list[Tensor | None] = field(default_factory=list)


class SplitBackward:
    """The backward of one microbatch through one stage, in two parts. Made by `split`."""

    def __init__(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], branches: Any
    ) -> None:
        self._roots, self._gradients, self._inputs = list(roots), list(gradients), list(inputs)
        self._branches: list[_Branches] | None = branches

    @classmethod
    def split(
        cls, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], *, has_hooks: bool
    ) -> SplitBackward | None:
        """Return both parts; None if they cannot be separated, or if both would call hooks.

        Without inputs or roots, the second part does all the work.
        """
        if not roots or not inputs:
            return cls(roots, gradients, inputs, None)
        branches = None if has_hooks else _find_branches(roots, inputs)
        return None if branches is None else cls(roots, gradients, inputs, branches)

    def input_gradients(self) -> None:
        """Compute the gradients of the inputs, and add them."""
        if self._branches is None:
            return
        hooks = [_listen(branches) for branches in self._branches]
        try:
            torch.autograd.backward(self._roots, self._gradients, retain_graph=True, inputs=self._inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def weight_gradients(self) -> None:
        """Compute the gradients of the weights, and add them."""
        if self._branches is not None:
            branches = self._branches
            while branches:
                one = branches.pop(0)
                arrived = [(GradientEdge(one.node, n), g) for n, g in enumerate(one.arrived) if g is not None]
                if arrived:
                    edges, gradients = zip(*arrived, strict=True)
                    torch.autograd.backward(edges, gradients, inputs=one.weights)
        elif self._roots:
            torch.autograd.backward(self._roots, self._gradients)


def _listen(branches: _Branches) -> Any:
    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        branches.arrived = list(gradients)

    return registrations.register(branches.node.register_prehook, arrived)


def _find_branches(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[_Branches] | None:
    """Return the branches off the trunk; None if several end at one weight, or if the graph must run in one pass."""
    ends = {_accumulator(tensor) for tensor in inputs}
    order = _topological([root.grad_fn for root in roots if root.grad_fn is not None])
    if any(calls_backward(node) for node in order):
        return None
    trunk: set[Node] = set()
    for node in order:
        if node in ends or any(after in trunk for after, _ in node.next_functions if after is not None):
            trunk.add(node)
    branches: list[_Branches] = []
    seen: set[int] = set()
    for node in reversed(order):
        if node not in trunk or node in ends:
            continue
        weights = _weights_behind([after for after, _ in node.next_functions if after is not None], trunk)
        if not weights:
            continue
        if any(id(weight) in seen for weight in weights):
            return None
        seen |= {id(weight) for weight in weights}
        branches.append(_Branches(node, weights))
    outside = [node for node in (root.grad_fn for root in roots) if node is not None and node not in trunk]
    return None if any(True for _ in _weights_behind(outside, trunk)) else branches


def _accumulator(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _topological(starts: Sequence[Node]) -> list[Node]:
    """Return all reachable nodes, each after its successors."""
    order: list[Node] = []
    state: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in state:
            continue
        state[node] = True
        stack.append((node, True))
        stack += [(after, False) for after, _ in node.next_functions if after is not None and after not in state]
    return order


def _weights_behind(nodes: Sequence[Node], trunk: set[Node]) -> list[Tensor]:
    """Return the weights that can be reached without the trunk."""
    return [node.variable for node in _topological([n for n in nodes if n not in trunk]) if hasattr(node, "variable")]
