"""Split a backward in two: the gradients of a stage's inputs first, those of its weights later.

The graph of a stage has a trunk, all that leads to its inputs, and branches off it that lead to weights only. The first
pass runs the trunk, and notes what comes to each node from which a branch goes. The second pass runs the branches from
there. A weight at which several branches end would be reached from one of them along the trunk, and counted twice: such
a graph is not split. Nor is one with hooks, for a node from which a branch goes is run by both passes.
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
    """The weights to which branches off one node of the trunk lead, and what has come to that node."""

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
        """Return both parts; None if they cannot be told apart, or hooks would be called by both.

        Where there are no inputs, or nothing to begin with, the second one does everything.
        """
        if not roots or not inputs:
            return cls(roots, gradients, inputs, None)
        branches = None if has_hooks else _find_branches(roots, inputs)
        return None if branches is None else cls(roots, gradients, inputs, branches)

    def input_gradients(self) -> None:
        """Add to the gradients of the inputs."""
        if self._branches is None:
            return
        hooks = [_listen(branches) for branches in self._branches]
        try:
            torch.autograd.backward(self._roots, self._gradients, retain_graph=True, inputs=self._inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def weight_gradients(self) -> None:
        """Add to the gradients of the weights."""
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
    """Return the branches off the trunk; None if several of them end at one weight, or the graph runs as a whole."""
    ends = {_accumulator(tensor) for tensor in inputs}
    order = _topological([root.grad_fn for root in roots if root.grad_fn is not None])
    if any(calls_backward(node) for node in order):
        return None
    trunk: set[Node] = set()
    for node in order:
        if node in ends or any(after in trunk for after, _ in node.next_functions if after is not None):
            trunk.add(node)
    found: list[_Branches] = []
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
        found.append(_Branches(node, weights))
    beside = [node for node in (root.grad_fn for root in roots) if node is not None and node not in trunk]
    return None if any(True for _ in _weights_behind(beside, trunk)) else found


def _accumulator(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _topological(starts: Sequence[Node]) -> list[Node]:
    """Return all nodes that can be reached, each after those it leads to."""
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
