"""Hierarchy: collectives of ranks on several nodes, as steps within each node and one step between the nodes.

The ranks with the same place on their nodes form a *rail* (`topology`). A program has steps of the node, in which ranks
of one node exchange chunks, then one verb along each rail, then steps of the node again. So no byte crosses the network
more often than it must, and all rails of a node share its network card. An all-reduce, for example: reduce-scatter in
the node, which gives rail c share c of the node's sum; all-reduce of the share in each rail; all-gather in the node.
Source: the hierarchical all-reduce of Jia et al. 2018, "Highly scalable deep learning training system".

`schedule.rail_map` has the chunks of the data and the buffers that hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from commlib.errors import UsageError
from commlib.schedule.ir import EMPTY, Span
from commlib.schedule.layout import Layout, even, uneven
from commlib.schedule.rail_map import BUFFERS, Buffer, RailMap
from commlib.schedule.spans import chunk

HIERARCHICAL = {
    "all_reduce": "Reduce-scatter in the node, all-reduce in each rail, all-gather in the node.",
    "reduce_scatter": "Reduce each rail's chunks in the node, reduce-scatter in each rail, distribute in the node.",
    "all_gather": "All-gather in the node, all-gather in each rail, distribute the other nodes' chunks in the node.",
    "broadcast": "Scatter in the root's node, broadcast in each rail, all-gather in the nodes.",
    "all_to_all": "Exchange in the node and gather what leaves it, exchange in each rail, distribute in the node.",
    "barrier": "Synchronize the ranks of each node, then the nodes, then the ranks of each node again.",
}
"""The verbs with a hierarchical program, and their steps. In the others the port of the root is the bottleneck."""

Contents = Mapping[tuple[int, Buffer], tuple[int, ...]]
"""The numbers of the chunks in each buffer of a node's ranks."""

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


Steps = tuple[NodeStep, ...]


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
class HierarchicalProgram:
    """All steps of one rank in a hierarchical collective.

    rail: None if the rank is on no rail. contents: `chunks` of the node's ranks.
    """

    verb: str
    rail_map: RailMap
    rank: int
    root: int
    before: Steps
    rail: RailStep | None
    after: Steps
    contents: Contents

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of the data, so that the chunks are shares of it, one for each rail."""
        return self.verb in ("all_reduce", "broadcast")

    def layout(self, rank: int, buffer: Buffer, counts: Sequence[int]) -> Layout:
        """Return the layout of a buffer of a rank. counts: the elements of each chunk, in an all_to_all by receiver."""
        chunks = self.chunks(rank, buffer)
        if len(set(counts)) == 1:
            return even(len(chunks) * counts[0], len(chunks)) if chunks else uneven(())
        return uneven(counts[number % len(counts)] for number in chunks)

    def chunks(self, rank: int, buffer: Buffer) -> tuple[int, ...]:
        """Return the numbers of the data's chunks in a buffer of a rank, in order: see `RailMap.chunks`."""
        known = self.contents.get((rank, buffer))
        return self.rail_map.chunks(self.verb, rank, buffer) if known is None else known

    @property
    def slot_chunks(self) -> int:
        """The most chunks that any rank of any node passes to others in one step."""
        rail_map = self.rail_map
        match self.verb:
            case "all_gather":
                return len(rail_map.order(0))
            case "all_to_all":
                return rail_map.size * rail_map.most_members
            case _:
                return rail_map.rails if self.is_whole else rail_map.size

    @property
    def rail_chunks(self) -> int:
        """The most chunks that any rank of a rail sends or receives between the nodes."""
        rail_map = self.rail_map
        if self.verb == "all_to_all":
            return len(rail_map.nodes) * max(map(len, rail_map.nodes)) * rail_map.most_members
        return 1 if self.is_whole else len(rail_map.order(0))


@lru_cache(maxsize=64)
def hierarchical_program(
    verb: str, nodes: tuple[tuple[int, ...], ...], rails: int, rank: int, root: int = 0
) -> HierarchicalProgram:
    """Return the program of a rank. nodes: the ranks of each node. Cached. Raises UsageError for invalid arguments."""
    if verb not in HIERARCHICAL:
        raise UsageError(f"{verb} has no hierarchical form; expected one of {', '.join(HIERARCHICAL)}")
    rail_map, most = RailMap(nodes, rails), min(map(len, nodes))
    if not 1 <= rails <= most:
        raise UsageError(f"hierarchical {verb}: rails must be in 1..{most}, the size of the smallest node, got {rails}")
    for what, number in (("rank", rank), ("root", root)):
        if not 0 <= number < rail_map.size:
            raise UsageError(f"hierarchical {verb}: {what} must be in 0..{rail_map.size - 1}, got {number}")
    node = rail_map.node(rank)
    contents = {(each, buffer): rail_map.chunks(verb, each, buffer) for each in nodes[node] for buffer in BUFFERS}
    before, after = _node_steps(verb, nodes[node], contents, root)
    place = nodes[node].index(rank)
    rail = _rail_step(verb, rail_map, node, place, root) if place < rails else None
    return HierarchicalProgram(verb, rail_map, rank, root, before, rail, after, contents)


def join(runs: Iterable[Run]) -> list[Run]:
    """Return the same runs, in order, with those that continue each other in source and target made one."""
    joined: list[Run] = []
    for source, target, length in runs:
        if joined and (source, target) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((source, target, length))
    return joined


def _rail_step(verb: str, rail_map: RailMap, node: int, place: int, root: int) -> RailStep:
    members = tuple(len(rail_map.members(number, place)) for number in range(len(rail_map.nodes)))
    match verb:
        case "barrier":
            return RailStep(verb, 0, ())
        case "reduce_scatter" | "all_gather":
            return RailStep(verb, 0, (members,))
        case "all_to_all":
            outgoing = [len(rail_map.nodes[node]) * count for count in members]
            incoming = [len(ranks) * members[node] for ranks in rail_map.nodes]
            outgoing[node] = incoming[node] = 0  # these chunks stay in the node
            return RailStep(verb, 0, (tuple(outgoing), tuple(incoming)))
        case _:
            return RailStep(verb, rail_map.node(root) if verb == "broadcast" else 0, ((1,),))


def _node_steps(verb: str, ranks: Sequence[int], contents: Contents, root: int) -> tuple[Steps, Steps]:
    """Return the steps of a node before the rail's verb, and those after it."""
    deliver = partial(_deliver, ranks, contents)
    match verb:
        case "all_reduce" | "reduce_scatter":
            combine = NodeStep(deliver("source", ["outgoing"]), reduce=True)
            return (combine,), (NodeStep(deliver("incoming", ["target"])),)
        case "all_gather":
            steps = NodeStep(deliver("source", ["target"])), NodeStep(deliver("target", ["outgoing"], local=True))
            return steps, (NodeStep(deliver("incoming", ["target"], without=ranks)),)
        case "all_to_all":
            return (NodeStep(deliver("source", ["target", "outgoing"])),), (NodeStep(deliver("incoming", ["target"])),)
        case "barrier":
            first, *others = ranks
            arrive = [Transfer(Part(rank, "source", EMPTY), Part(first, "outgoing", EMPTY)) for rank in others]
            depart = [Transfer(Part(first, "incoming", EMPTY), Part(rank, "target", EMPTY)) for rank in others]
            return (NodeStep(tuple(arrive)),), (NodeStep(tuple(depart)),)
        case _ if root not in ranks:
            return (), (NodeStep(deliver("incoming", ["target"])),)
        case _:  # the root's node scatters the shares, and later gathers what it has scattered
            shares = [(each, ranks[each.source.span.start]) for each in deliver("target", ["target"])]
            scatter = (each for each, owner in shares if root == each.source.rank != each.target.rank == owner)
            gather = (each for each, owner in shares if owner == each.source.rank != each.target.rank != root)
            leave = NodeStep(deliver("target", ["outgoing"], local=True))
            return (NodeStep(tuple(scatter)), leave), (NodeStep(tuple(gather)),)


def _deliver(
    ranks: Sequence[int],
    contents: Contents,
    source: Buffer,
    targets: Sequence[Buffer],
    *,
    local: bool = False,
    without: Sequence[int] = (),
) -> tuple[Transfer, ...]:
    """Return the transfers to all ranks' targets of the chunks in them that ranks of the node have in their sources.

    local: only those of a rank to itself. without: not of these chunks.
    """
    given: dict[int, list[Part]] = {}
    for rank in ranks:
        for position, number in enumerate(contents[rank, source]):
            given.setdefault(number, []).append(Part(rank, source, chunk(position)))
    return tuple(
        Transfer(part, Part(rank, target, chunk(position)))
        for rank in ranks
        for target in targets
        for position, number in enumerate(contents[rank, target])
        if number not in without
        for part in given.get(number, ())
        if not local or part.rank == rank
    )
