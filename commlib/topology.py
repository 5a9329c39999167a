"""Topology: the ranks of a group by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.errors import UsageError


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of each node, ascending; the nodes in the order of their first ranks.

    Between nodes data moves in *rails*: rail c connects the c-th rank of every node. There are as many rails as the
    smallest node has ranks. The remaining ranks of larger nodes do not use the network.
    """

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, labels: Sequence[int]) -> Topology:
        """Return the topology of ranks 0, 1, ..., given the label of each rank's node."""
        if not labels:
            raise UsageError("a topology needs at least one rank")
        nodes: dict[int, list[int]] = {}
        for rank, label in enumerate(labels):
            nodes.setdefault(label, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in nodes.values()))

    @property
    def rails(self) -> int:
        """The number of rails."""
        return min(len(ranks) for ranks in self.nodes)

    @property
    def is_flat(self) -> bool:
        """Whether no two ranks share a node."""
        return all(len(ranks) == 1 for ranks in self.nodes)

    def node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(index for index, ranks in enumerate(self.nodes) if rank in ranks)

    def rail(self, number: int) -> tuple[int, ...]:
        """Return the ranks of one rail, one per node."""
        return tuple(ranks[number] for ranks in self.nodes)
