"""Hierarchy: for a group on several nodes, this rank's transports to its node and to its rail, and shared memories.

Rail r connects the r-th rank of every node (see `topology`). Only operations of the group itself use the two
transports, so other messages never interleave. Groups that users make of a node are separate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
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


Gather = Callable[[Any], list[Any]]


class Memories:
    """The symmetric memories of one group: on the host, and on each device where they were requested.

    gather: all-gathers an object of each rank; gather_in_node: within this node.
    """

    def __init__(self, hierarchy: Hierarchy, gather_in_node: Gather, gather: Gather) -> None:
        self._hierarchy, self._gather_in_node, self._gather = hierarchy, gather_in_node, gather
        self.host = self._create(lambda nbytes: hierarchy.node.share(nbytes, gather_in_node))
        self._on: dict[Any, SymmetricMemory] = {HOST: self.host}

    def on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        result = self._on.get(device)
        if result is None:
            place, gather = self._hierarchy.place, self._gather_in_node
            result = self._on[device] = self._create(lambda nbytes: device.share(nbytes, place, gather))
        return result

    def _create(self, share: Callable[[int], Any]) -> SymmetricMemory:
        return SymmetricMemory(self._hierarchy.place, share, self._gather)

    def close(self) -> None:
        """Release all memories."""
        for memory in self._on.values():
            memory.close()
