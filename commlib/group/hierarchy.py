"""Hierarchy: split a group on several nodes into two groups for this rank, its node and its rail.

Rail r joins the r-th rank of every node (see `topology`). Both are used within operations of the whole group alone, so
that nothing can come between; what users do on a node of their own has groups of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.topology import Topology
from commlib.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Hold this rank's groups. place: its number on its node, and that of its rail; `rail` is None beyond the rails."""

    topology: Topology
    number: int  # of this rank's node
    place: int
    node: Transport
    rail: Transport | None

    @classmethod
    def of(cls, transport: Transport, topology: Topology) -> Hierarchy:
        """Return that of one rank. It costs no message: both parts send over the transport of the whole."""
        number = topology.node(transport.rank)
        ranks = topology.nodes[number]
        place = ranks.index(transport.rank)
        rail = transport.among(topology.rail(place)) if place < topology.rails else None
        return cls(topology, number, place, transport.among(ranks), rail)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, by their places."""
        return self.topology.nodes[self.number]
