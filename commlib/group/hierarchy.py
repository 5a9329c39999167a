"""Hierarchy: for a group on several nodes, this rank's transports to its node and to its rail.

Rail r connects the r-th rank of every node (see `topology`). Only operations of the group itself use the two
transports, so other messages never interleave. Groups that users make of a node are separate.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlib.topology import Topology
from commlib.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """This rank's node and rail. place: its index in the node and the number of its rail; rail: None without one."""

    topology: Topology
    number: int  # index of this rank's node
    place: int
    node: Transport
    rail: Transport | None

    @classmethod
    def of(cls, transport: Transport, topology: Topology) -> Hierarchy:
        """Return the hierarchy of one rank. It sends no messages: both parts use the transport of the group."""
        number = topology.node(transport.rank)
        ranks = topology.nodes[number]
        place = ranks.index(transport.rank)
        rail = transport.among(topology.rail(place)) if place < topology.rails else None
        return cls(topology, number, place, transport.among(ranks), rail)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node, by place."""
        return self.topology.nodes[self.number]
