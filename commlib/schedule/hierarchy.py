"""Hierarchy: collectives of ranks on several nodes, as steps within each node and one step between the nodes.

The ranks with the same place on their nodes form a *rail* (`topology`). A program has steps of the node, in which ranks
of one node exchange chunks, then one verb along each rail, then steps of the node again. So no byte crosses the network
more often than it must, and all rails of a node share its network card. An all-reduce, for example: reduce-scatter in
the node, which gives rail c share c of the node's sum; all-reduce of the share in each rail; all-gather in the node.
Source: the hierarchical all-reduce of Jia et al. 2018, "Highly scalable deep learning training system".

The data is numbered in chunks: one for each rail if every rank has all of the data (all_reduce, broadcast), else one
for each rank. A rank has four buffers of such chunks: `source` and `target` (of the caller; a broadcast has only
`target`), `outgoing` (what the rail's verb reads) and `incoming` (what it writes). `HierarchicalProgram.chunks` lists
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from commlib.errors import UsageError
from commlib.schedule.ir import EMPTY, Span
from commlib.schedule.spans import chunk

Buffer = Literal["source", "target", "outgoing", "incoming"]

HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
"""The verbs with a hierarchical program. In the others the bottleneck is the port of the root, nodes or not."""

Run = tuple[int, int, int]
"""A contiguous piece of a transfer: its start in the source, its start in the target, and its length."""


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks of a buffer of a rank, by their position in the buffer."""

    rank: int
    buffer: Buffer
    span: Span


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move chunks from one part to another. The ranks are on one node, and may be the same."""

    source: Part
    target: Part


@dataclass(frozen=True, slots=True)
class NodeStep:
    """Transfers among the ranks of one node, all at once. Every rank of the node has the same list.

    reduce: combine all that arrives in a chunk, in the order of ranks; a rank's transfer to itself is one operand.
    """

    transfers: tuple[Transfer, ...]
    reduce: bool = False

    @property
    def is_local(self) -> bool:
        """Whether every rank only copies."""
        return all(transfer.source.rank == transfer.target.rank for transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class RailStep:
    """The verb along the rail of this rank, in which the rank of node n is number n. root: of a broadcast, a node.

    regions: for each region of the verb, the chunks of each node in it, or of all nodes in one number. `buffers` has
    the buffer that fills the region; the other one is this node's part of it, or all of it.
    """

    verb: str
    root: int
    regions: tuple[tuple[int, ...], ...]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffer of each region."""
        buffers: dict[str, tuple[Buffer, ...]] = {"all_gather": ("incoming",), "all_to_all": ("outgoing", "incoming")}
        return buffers.get(self.verb, ("outgoing",))[: len(self.regions)]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks of each node, and the number of rails in use. It is at most the size of the smallest node."""

    nodes: tuple[tuple[int, ...], ...]
    rails: int

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    def members(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes over a rail. The first of them is on the rail."""
        return self.nodes[node][rail :: self.rails]

    def order(self, rail: int) -> tuple[int, ...]:
        """Return all ranks whose data goes over a rail, by node."""
        return tuple(chain.from_iterable(self.members(node, rail) for node in range(len(self.nodes))))

    @property
    def most_members(self) -> int:
        """The largest number of a node's ranks whose data one rail carries."""
        return max(len(self.members(node, 0)) for node in range(len(self.nodes)))

    def node(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if rank in ranks)


@dataclass(frozen=True, slots=True)
class HierarchicalProgram:
    """All steps of one rank in a hierarchical collective. rail: None if the rank is on no rail."""

    verb: str
    cluster: Cluster
    rank: int
    root: int
    before: tuple[NodeStep, ...]
    rail: RailStep | None
    after: tuple[NodeStep, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the data, so that the chunks are shares of it, one for each rail."""
        return self.verb in ("all_reduce", "broadcast")

    def chunks(self, rank: int, buffer: Buffer) -> tuple[int, ...]:
        """Return the numbers of the data's chunks in a buffer of a rank, in order."""
        return _chunks(self.verb, self.cluster, rank, buffer)

    @property
    def slot_chunks(self) -> int:
        """The most chunks that any rank of any node passes to others in one step."""
        cluster = self.cluster
        match self.verb:
            case "all_gather":
                return len(cluster.order(0))
            case "all_to_all":
                return cluster.size * cluster.most_members
            case _:
                return cluster.rails if self.is_whole else cluster.size

    @property
    def rail_chunks(self) -> int:
        """The most chunks that any rank of a rail sends or receives between the nodes."""
        cluster = self.cluster
        if self.verb == "all_to_all":
            return len(cluster.nodes) * max(map(len, cluster.nodes)) * cluster.most_members
        return 1 if self.is_whole else len(cluster.order(0))


@lru_cache(maxsize=64)
def hierarchical_program(
    verb: str, nodes: tuple[tuple[int, ...], ...], rails: int, rank: int, root: int = 0
) -> HierarchicalProgram:
    """Return the program of a rank. nodes: the ranks of each node. Cached. Raises UsageError for invalid arguments."""
    if verb not in HIERARCHICAL:
        raise UsageError(f"{verb} has no hierarchical form; expected one of {', '.join(HIERARCHICAL)}")
    cluster, most = Cluster(nodes, rails), min(map(len, nodes))
    if not 1 <= rails <= most:
        raise UsageError(
            f"hierarchical {verb}: rails must be in 1..{most}, the ranks of the smallest node, got {rails}"
        )
    for what, number in (("rank", rank), ("root", root)):
        if not 0 <= number < cluster.size:
            raise UsageError(f"hierarchical {verb}: {what} must be in 0..{cluster.size - 1}, got {number}")
    node = cluster.node(rank)
    before, after = _STEPS[verb](cluster, node, root)
    place = nodes[node].index(rank)
    rail = _rail_step(verb, cluster, node, place, root) if place < rails else None
    return HierarchicalProgram(verb, cluster, rank, root, before, rail, after)


def join(runs: Iterable[Run]) -> list[Run]:
    """Return the same runs, in order, with those that continue each other in source and target made one."""
    joined: list[Run] = []
    for source, target, length in runs:
        if joined and (source, target) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((source, target, length))
    return joined


def _chunks(verb: str, cluster: Cluster, rank: int, buffer: Buffer) -> tuple[int, ...]:
    node = cluster.node(rank)
    place = cluster.nodes[node].index(rank)
    has_rail, others = place < cluster.rails, [number for number in range(len(cluster.nodes)) if number != node]
    everyone = tuple(range(cluster.size))
    match verb, buffer:
        case "barrier", _:
            return ()
        case "all_reduce" | "broadcast", "source" | "target":
            return tuple(range(cluster.rails))
        case ("reduce_scatter", "source") | ("all_gather", "target") | ("all_to_all", "source" | "target"):
            return everyone
        case ("reduce_scatter", "target") | ("all_gather", "source"):
            return (rank,)
        case _ if not has_rail:
            return ()
        case "all_reduce" | "broadcast", _:
            return (place,)
        case ("reduce_scatter", "outgoing") | ("all_gather", "incoming"):
            return cluster.order(place)
        case ("reduce_scatter", "incoming") | ("all_gather", "outgoing"):
            return cluster.members(node, place)
        case "all_to_all", "outgoing":  # for each other node, from each rank of this one: to its ranks of the rail
            return tuple(
                receiver for n in others for _ in cluster.nodes[node] for receiver in cluster.members(n, place)
            )
        case _:  # from each rank of each other node: to this node's ranks of the rail
            return tuple(
                receiver for n in others for _ in cluster.nodes[n] for receiver in cluster.members(node, place)
            )


def _rail_step(verb: str, cluster: Cluster, node: int, place: int, root: int) -> RailStep:
    members = tuple(len(cluster.members(number, place)) for number in range(len(cluster.nodes)))
    match verb:
        case "barrier":
            return RailStep(verb, 0, ())
        case "reduce_scatter" | "all_gather":
            return RailStep(verb, 0, (members,))
        case "all_to_all":
            outgoing = [len(cluster.nodes[node]) * count for count in members]
            incoming = [len(ranks) * members[node] for ranks in cluster.nodes]
            outgoing[node] = incoming[node] = 0  # these chunks stay in the node
            return RailStep(verb, 0, (tuple(outgoing), tuple(incoming)))
        case _:
            return RailStep(verb, cluster.node(root) if verb == "broadcast" else 0, ((1,),))


Steps = tuple[tuple[NodeStep, ...], tuple[NodeStep, ...]]
"""The steps of a node before the rail's verb, and those after it."""


def _transfer(giver: int, source: Buffer, position: int, taker: int, target: Buffer, place: int) -> Transfer:
    return Transfer(Part(giver, source, chunk(position)), Part(taker, target, chunk(place)))


def _step(transfers: Iterable[Transfer], *, reduce: bool = False) -> NodeStep:
    return NodeStep(tuple(transfers), reduce)


def _spread_shares(ranks: Sequence[int], rails: int, buffer: Buffer) -> Iterator[Transfer]:
    """Give every rank of the node each share, from the rank of its rail."""
    for rail in range(rails):
        for rank in ranks:
            if (rank, buffer) != (ranks[rail], "target"):
                yield _transfer(ranks[rail], buffer, rail if buffer == "target" else 0, rank, "target", rail)


def _all_reduce(cluster: Cluster, node: int, root: int) -> Steps:
    ranks, rails = cluster.nodes[node], cluster.rails
    combine = (_transfer(rank, "source", rail, ranks[rail], "outgoing", 0) for rail in range(rails) for rank in ranks)
    return (_step(combine, reduce=True),), (_step(_spread_shares(ranks, rails, "incoming")),)


def _broadcast(cluster: Cluster, node: int, root: int) -> Steps:
    ranks, rails = cluster.nodes[node], cluster.rails
    if root not in ranks:
        return (), (_step(_spread_shares(ranks, rails, "incoming")),)
    scatter = (_transfer(root, "target", rail, ranks[rail], "target", rail) for rail in range(rails))
    leave = (_transfer(ranks[rail], "target", rail, ranks[rail], "outgoing", 0) for rail in range(rails))
    spread = (each for each in _spread_shares(ranks, rails, "target") if each.target.rank != root)
    return (_step(each for each in scatter if each.target.rank != root), _step(leave)), (_step(spread),)


def _reduce_scatter(cluster: Cluster, node: int, root: int) -> Steps:
    ranks = cluster.nodes[node]
    combine = (
        _transfer(rank, "source", receiver, ranks[rail], "outgoing", position)
        for rail in range(cluster.rails)
        for position, receiver in enumerate(cluster.order(rail))
        for rank in ranks
    )
    spread = (
        _transfer(ranks[rail], "incoming", position, receiver, "target", 0)
        for rail in range(cluster.rails)
        for position, receiver in enumerate(cluster.members(node, rail))
    )
    return (_step(combine, reduce=True),), (_step(spread),)


def _all_gather(cluster: Cluster, node: int, root: int) -> Steps:
    ranks = cluster.nodes[node]
    gather = (_transfer(rank, "source", 0, receiver, "target", rank) for rank in ranks for receiver in ranks)
    leave = (
        _transfer(ranks[rail], "target", rank, ranks[rail], "outgoing", position)
        for rail in range(cluster.rails)
        for position, rank in enumerate(cluster.members(node, rail))
    )
    spread = (
        _transfer(ranks[rail], "incoming", position, receiver, "target", rank)
        for rail in range(cluster.rails)
        for position, rank in enumerate(cluster.order(rail))
        if rank not in ranks
        for receiver in ranks
    )
    return (_step(gather), _step(leave)), (_step(spread),)


def _all_to_all(cluster: Cluster, node: int, root: int) -> Steps:
    ranks, nodes = cluster.nodes[node], range(len(cluster.nodes))
    send = [_transfer(rank, "source", other, other, "target", rank) for rank in ranks for other in ranks]
    spread = []
    for rail in range(cluster.rails):
        outgoing = incoming = 0
        for number in nodes:
            if number == node:
                continue
            for rank in ranks:
                for receiver in cluster.members(number, rail):
                    send.append(_transfer(rank, "source", receiver, ranks[rail], "outgoing", outgoing))
                    outgoing += 1
            for sender in cluster.nodes[number]:
                for receiver in cluster.members(node, rail):
                    spread.append(_transfer(ranks[rail], "incoming", incoming, receiver, "target", sender))
                    incoming += 1
    return (_step(send),), (_step(spread),)


def _barrier(cluster: Cluster, node: int, root: int) -> Steps:
    first, *others = cluster.nodes[node]
    arrive = (Transfer(Part(rank, "source", EMPTY), Part(first, "outgoing", EMPTY)) for rank in others)
    leave = (Transfer(Part(first, "incoming", EMPTY), Part(rank, "target", EMPTY)) for rank in others)
    return (_step(arrive),), (_step(leave),)


_STEPS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
