"""Collectives of groups on several nodes: shared memory within each, messages between them.

Of every node the first few ranks are on a rail, as many as the smallest node has: rank c of each node is in
*rail* c (`topology`). A reduction is reduce-scattered in the node, so that rail c has slice c of the node's sum;
each rail combines its slices over the network; and the node gathers them. So every byte crosses the network once
where it must, and all rails of a node share its network card. The other verbs go the same three steps, as far as
they need them. Source: the hierarchical all-reduce of Jia et al. 2018, "Highly scalable deep learning training system".

Everything runs within one operation. `x` and `target` are contiguous, 1-D.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.rails import NOTHING, Node
from commlib.dtypes import Array
from commlib.execution.persistent import PersistentAllReduce
from commlib.execution.streaming import Region
from commlib.group.operation import signature
from commlib.node.call import Arithmetic, Exchange, NodeCollective, Range, ranges
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, even, uneven

if TYPE_CHECKING:
    from commlib.collectives.reductions import Accumulation
    from commlib.group.group import Group

# Of an all-reduce, what a rail reduces while its node combines the next part: several blocks for the executor.
_PART_BYTES = 1 << 20


def all_reduce(group: Group, accumulation: Accumulation, target: Array, text: str) -> None:
    """Reduce-scatter in the node, all-reduce in each rail, all-gather in the node, each of some part of the data.

    While one part is on the network, the node combines the next one and gathers the last.
    """
    x = accumulation.x
    node = Node(group, text, x.nbytes)
    # The rails' slices; in the node's shared memory the work may be anywhere, so it is where the result goes.
    work = x if accumulation.widened else target
    parts = _Parts(node, x)

    def combine(number: int) -> None:
        where, shares = parts.ranges[number], parts.shares(number, x.itemsize)
        own = shares[node.place] if node.on_rail else NOTHING
        sends = node.padded(shares) if len(node.ranks) > 1 else [shares[0]]
        exchange = Exchange(sends, [own] * len(node.ranks), max(length for _, length in shares))
        node.exchange(
            exchange,
            x[where],
            work[where],
            arithmetic=accumulation.arithmetic,
            offsets=[own[0]] * len(node.ranks),
            kind=("combine", where.stop - where.start),
        )

    def gather(number: int) -> None:
        where, shares = parts.ranges[number], parts.shares(number, target.itemsize)
        if node.on_rail:
            mine = parts.slice(number)
            accumulation.finish(work[mine], target[mine])
        node.gather_shares(target[where], shares, ("gather", where.stop - where.start))

    group.execute(
        parts.program,
        [[Region(work, layout)] for number in range(len(parts.ranges)) for layout in parts.blocks(number)],
        text,
        accumulation.reducer,
        part=1,
        transport=group.rail if node.on_rail else group.transport,
        before=lambda block: combine(block // parts.pieces) if block % parts.pieces == 0 else None,
        after=lambda block: gather(block // parts.pieces) if (block + 1) % parts.pieces == 0 else None,
    )


class _Parts:
    """How an all-reduce goes through the nodes and the network part by part: the same number of blocks on all ranks.

    `ranges` are the parts' elements in the whole, `pieces` the blocks in which a rail reduces its slice of a part.
    """

    def __init__(self, node: Node, x: Array) -> None:
        self._node, group, nodes = node, node.group, len(node.nodes)
        self._whole = even(len(x), max(1, x.nbytes // (node.rails * _PART_BYTES)))
        starts = self._whole.offsets
        self.ranges = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        # Of the longest slice of any rail: its number of blocks is that of all.
        nbytes = even(len(x), node.rails).counts[0] * x.itemsize
        choice = group.choose("all_reduce", "auto", nodes, nbytes, sharing=node.rails)
        each = ceil(choice.segments / len(self.ranges))
        pipelined = find("all_reduce", choice.algorithm).segmented
        self.pieces = 1 if pipelined else each
        rank, size = (node.number, nodes) if node.on_rail else (0, 1)  # alone there is nothing to send
        self.program = program("all_reduce", choice.algorithm, rank, size, segments=each if pipelined else 1)

    def _layout(self, number: int) -> Layout:
        where = self.ranges[number]
        return even(where.stop - where.start, self._node.rails)

    def shares(self, number: int, item_bytes: int) -> list[Range]:
        """Return what each rail reduces of a part, in bytes from the beginning of the part."""
        return ranges(self._layout(number), item_bytes)

    def slice(self, number: int) -> slice:
        """Return what this rank's rail reduces of a part, in elements of the whole."""
        start, stop = self._layout(number).slice_of(self._node.place)
        first = self.ranges[number].start
        return slice(first + start, first + stop)

    def blocks(self, number: int) -> list[Layout]:
        """Return the blocks of this rank's slice of a part, for the program; without elements if it is on no rail."""
        mine = self.slice(number) if self._node.on_rail else slice(0, 0)
        cuts = blocks(mine.stop - mine.start, self.program.regions[0], self.pieces)
        return [Layout(tuple(mine.start + offset for offset in layout.offsets)) for layout in cuts]


def small_all_reduce(group: Group, dtype: Any, operation: str, count: int, text: str) -> PersistentAllReduce:
    """Return the same through one rail, set up once: each node's first rank combines, exchanges and hands out."""
    small = PersistentAllReduce(dtype, operation, count, group.size)
    place, size = group.topology.nodes[group.topology.node(group.rank)].index(group.rank), 1
    at, everything = address_of(small.buffer), (0, small.buffer.nbytes)
    if group.board is not None:
        size = group.board.size
        sum_up = Exchange([everything], [everything if place == 0 else NOTHING] * size, everything[1])
        arithmetic = Arithmetic(small.wide, small.combines, small.buffer.itemsize, 0)
        combine = NodeCollective.exchange(group, text, sum_up, arithmetic)
        small.then(lambda: combine.run_at(at, at))
    if place == 0:
        assert group.rail is not None
        choice = group.choose("all_reduce", "auto", group.rail.size, everything[1])
        steps = program("all_reduce", choice.algorithm, group.rail.rank, group.rail.size)
        small.then_messages(steps, group.rail, signature(text), group.on_wait(text))
    if size > 1:
        takes = [everything if other == 0 and place != 0 else NOTHING for other in range(size)]
        sends = [everything if place == 0 else NOTHING]
        spread = NodeCollective.exchange(group, text, Exchange(sends, takes, everything[1]))
        small.then(lambda: spread.run_at(at, at))
    return small


def broadcast(group: Group, x: Array, root: int, text: str) -> None:
    """Scatter in the root's node, broadcast in each rail, all-gather in the nodes."""
    node = Node(group, text, x.nbytes)
    layout = even(len(x), node.rails)
    shares = ranges(layout, x.itemsize)
    home = group.topology.node(root)
    if node.number == home:
        source = node.ranks.index(root)
        own = shares[node.place] if node.on_rail and group.rank != root else NOTHING
        takes = [own if place == source else NOTHING for place in range(len(node.ranks))]
        sends = node.padded(shares) if group.rank == root else [NOTHING] * len(node.ranks)
        if len(node.ranks) > 1:
            node.exchange(Exchange(sends, takes, max(length for _, length in shares)), x, x)
    if node.on_rail:
        start, stop = layout.slice_of(node.place)
        part = x[start:stop]
        node.network("broadcast", [part], [even(len(part), 1)], root=home)
    node.gather_shares(x, shares)


def _rail_layout(node: Node, rail: int, counts: Sequence[int]) -> Layout:
    """Return where each rank's chunk of one rail lies in it, node by node; `counts[r]` elements for rank r."""
    members = [rank for number in range(len(node.nodes)) for rank in node.in_rail(number, rail)]
    return uneven(counts[rank] for rank in members)


def _by_node(node: Node, rail: int, counts: Sequence[int]) -> Layout:
    """Return the same rail in one chunk for each node."""
    return uneven(sum(counts[rank] for rank in node.in_rail(number, rail)) for number in range(len(node.nodes)))


def reduce_scatter(group: Group, accumulation: Accumulation, layout: Layout, target: Array, text: str) -> None:
    """Reduce in the node what each rail stands for, reduce-scatter in each rail, hand on in the node."""
    x, counts = accumulation.x, layout.counts
    node = Node(group, text, x.nbytes)
    size, item, chunks = len(node.ranks), x.itemsize, ranges(layout, x.itemsize)
    longest = max(counts) * item
    rail = node.place if node.on_rail else 0
    own_rail = _rail_layout(node, rail, counts)
    scratch = np.empty(own_rail.count if node.on_rail else 0, x.dtype)
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.rails):  # one rank of that node for each rail
            receivers = ranks[layer : layer + node.rails]
            sends = node.padded([chunks[rank] for rank in receivers])
            takes_part = node.on_rail and node.place < len(receivers)
            length = counts[receivers[node.place]] if takes_part else 0
            take = (position * item, length * item)
            start = chunks[receivers[node.place]][0] if takes_part else 0
            if size == 1:
                sends = sends[:1]
            node.exchange(
                Exchange(sends, [take] * size, longest),
                x,
                scratch,
                arithmetic=accumulation.arithmetic,
                offsets=[start] * size,
            )
            position += length
    if node.on_rail:
        own = _by_node(node, rail, counts)
        node.network("reduce_scatter", [scratch], [own], reducer=accumulation.reducer)
        start, stop = own.slice_of(node.number)
        part = scratch[start:stop]
        reduced = np.empty(len(part), target.dtype)
        accumulation.finish(part, reduced)
    else:
        reduced = np.empty(0, target.dtype)
    _hand_on(node, reduced, counts, target)


def _hand_on(node: Node, held: Array, counts: Sequence[int], target: Array) -> None:
    """Give each rank of the node its chunk, which the rank of its rail has."""
    item = target.itemsize
    sends = [NOTHING] * len(node.ranks)
    if node.on_rail:
        position = 0
        for rank in node.in_rail(node.number, node.place):
            sends[node.ranks.index(rank)] = (position * item, counts[rank] * item)
            position += counts[rank]
    giver = node.place % node.rails
    takes = [(0, target.nbytes) if place == giver else NOTHING for place in range(len(node.ranks))]
    node.exchange(Exchange(sends, takes, max(counts) * item), held, target)


def all_gather(group: Group, x: Array, target: Array, text: str) -> None:
    """Collect in the node what each rail stands for, all-gather in each rail, gather in the node."""
    node = Node(group, text, x.nbytes * group.size)
    size, nbytes, count = len(node.ranks), x.nbytes, len(x)
    counts = [count] * group.size
    rail = node.place if node.on_rail else 0
    own_rail = _by_node(node, rail, counts)
    scratch = np.empty(own_rail.count if node.on_rail else 0, x.dtype)
    begin = own_rail.offsets[node.number] * x.itemsize
    giver = node.place % node.rails
    sends = [(0, nbytes) if place == giver else NOTHING for place in range(size)]
    takes = [NOTHING] * size
    if node.on_rail:
        for index, rank in enumerate(node.in_rail(node.number, node.place)):
            takes[node.ranks.index(rank)] = (begin + index * nbytes, nbytes)
    node.exchange(Exchange(sends, takes, nbytes), x, scratch)
    if node.on_rail:
        node.network("all_gather", [scratch], [own_rail])
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.rails):
            members = ranks[layer : layer + node.rails]
            has_one = node.on_rail and node.place < len(members)
            send = (position, nbytes) if has_one else NOTHING
            position += send[1]
            node.exchange(
                Exchange([send], node.padded([(rank * nbytes, nbytes) for rank in members]), nbytes), scratch, target
            )


def all_to_all(group: Group, x: Array, target: Array, text: str) -> None:
    """Collect in the node what goes through each rail, exchange in each rail, hand on in the node."""
    node = Node(group, text, x.nbytes)
    size, item, chunk = len(node.ranks), x.itemsize, len(x) // group.size
    nbytes = chunk * item
    # For each node: the chunks of all ranks here for its ranks in my rail, receiver by receiver.
    rail = node.place if node.on_rail else 0
    receivers = [len(node.in_rail(number, rail)) if node.on_rail else 0 for number in range(len(node.nodes))]
    outgoing = uneven(number * size * chunk for number in receivers)
    leaving = np.empty(outgoing.count, x.dtype)
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.rails):
            members = ranks[layer : layer + node.rails]
            sends = node.padded([(rank * nbytes, nbytes) for rank in members])
            takes = [NOTHING] * size
            if node.on_rail and node.place < len(members):
                takes = [(position + place * nbytes, nbytes) for place in range(size)]
                position += size * nbytes
            node.exchange(Exchange(sends if size > 1 else sends[:1], takes, nbytes), x, leaving)
    here = receivers[node.number]
    incoming = uneven(here * len(ranks) * chunk for ranks in node.nodes)
    arrived = np.empty(incoming.count, x.dtype)
    if node.on_rail:
        # Where nodes differ, ranks have different amounts to send.
        most = max(receivers) * max(map(len, node.nodes)) * len(node.nodes) * nbytes
        node.network("all_to_all", [leaving, arrived], [outgoing, incoming], nbytes=most)
    # From each node: for each of my rail's ranks here, the chunks of all ranks there.
    for number, ranks in enumerate(node.nodes):
        sent = len(ranks) * chunk
        landed = np.empty(sent, x.dtype)
        counts = [sent] * group.size
        begin = incoming.offsets[number]
        _hand_on(node, arrived[begin : begin + here * sent], counts, landed)
        for index, rank in enumerate(ranks):
            target[rank * chunk : (rank + 1) * chunk] = landed[index * chunk : (index + 1) * chunk]


def barrier(group: Group, text: str) -> None:
    """Meet in the node, then between the nodes, then in the node again."""
    node = Node(group, text, 0)
    meeting = Exchange([NOTHING], [NOTHING] * len(node.ranks), 0)
    nothing = np.empty(0, np.uint8)
    node.exchange(meeting, nothing, nothing)
    if node.on_rail:
        assert group.rail is not None
        steps = program("barrier", "dissemination", group.rail.rank, group.rail.size)
        group.execute(steps, [[]], text, transport=group.rail)
    node.exchange(meeting, nothing, nothing)
