"""Scopes: choose the ranks that measure algorithms, within a node and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from commlib.communicator import Communicator
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.devices.protocol import Device


@dataclass(frozen=True, slots=True)
class Scope:
    """Groups that exchange messages at the same time; `group` is this rank's, None if it does not participate.

    On one node `nodes` is 1 and the group has `ranks_per_node` ranks. Between nodes the group has one rank of each
    node, and `ranks_per_node` groups share the network cards. The groups are used for data of `smallest` to `largest`
    bytes. device: of the arrays, None for host memory; with a device, one group of all ranks participates.
    """

    nodes: int
    ranks_per_node: int
    group: Communicator | None
    smallest: float = 0
    largest: float = inf
    device: Device | None = None

    @property
    def size(self) -> int:
        """The number of ranks in each group."""
        if self.device is not None and self.group is not None:
            return self.group.size
        return self.nodes if self.nodes > 1 else self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Cluster:
    """The scopes of a communicator, and two ranks for each type of link (None if there are no two)."""

    places: tuple[Scope, ...]
    neighbours: tuple[int, int] | None
    across: tuple[int, int] | None


def survey(comm: Communicator) -> Cluster:
    """Make the groups that a collective of `comm` uses: nodes, one rail, and all rails at once. Collective.

    Nodes with another number of ranks than the first do not participate in its measurements.
    """
    topology = comm.topology
    first, *others = topology.nodes
    places = []
    if len(first) > 1:
        here = comm.node()
        places.append(Scope(1, len(first), here if here.size == len(first) else None))
    if others:
        group = comm.parts().rail
        one = group if comm.parts().place == 0 else None
        several = topology.rails > 1
        # Smaller data uses one rail (`collectives.rails`), so it need not be measured on several.
        places.append(Scope(len(others) + 1, 1, one, largest=RAIL_BYTES if several else inf))
        if several:
            places.append(Scope(len(others) + 1, topology.rails, group, smallest=RAIL_BYTES))
    return Cluster(
        tuple(places),
        (first[0], first[1]) if len(first) > 1 else None,
        (first[0], others[0][0]) if others else None,
    )


def device_scope(comm: Communicator, device: Device) -> Scope:
    """Return the scope of all ranks of a communicator, with arrays of a device."""
    nodes = comm.topology.nodes
    return Scope(len(nodes), max(map(len, nodes)), comm, device=device)
