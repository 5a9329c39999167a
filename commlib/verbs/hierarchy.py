"""Collectives of groups on several nodes: shared memory within each, messages between them.

Of every node the first few ranks stand on the network, as many as the smallest node has: rank c of each node is in
*column* c (`topology`). A reduction is reduce-scattered in the node, so that column c has slice c of the node's sum;
each column combines its slices over the network; and the node gathers them. So every byte crosses the network once
where it must, and all columns of a node share its network card. The other verbs go the same three steps, as far as
they need them. Source: the hierarchical all-reduce of Jia et al. 2018, "Highly scalable deep learning training system".

Everything runs within one operation. `x` and `target` are contiguous, 1-D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.executor import Reducer, Region
from commlib.prepared import PREPARED_BYTES
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, cut, even, uneven
from commlib.verbs.node import SMALL_BYTES, Arithmetic, Exchange, NodeCall, Range, ranges

if TYPE_CHECKING:
    from commlib.group import Group
    from commlib.verbs.reduction import Accumulation

# With less than this for each column, one column does it all: latency counts, and only one rank then needs a core.
_COLUMN_BYTES = 64 << 10

_NOTHING: Range = (0, 0)


class _Node:
    """This rank's node in one call: who is on it, and how its ranks exchange."""

    def __init__(self, group: Group, text: str, nbytes: int) -> None:
        topology = group.topology
        self.group, self.text = group, text
        self.number = topology.node(group.rank)
        self.ranks = topology.nodes[self.number]
        self.nodes = topology.nodes
        self.place = self.ranks.index(group.rank)
        self.columns = max(1, min(topology.columns, nbytes // _COLUMN_BYTES))
        self.on_network = self.place < self.columns
        self._part = self._step = 0

    def in_column(self, node: int, column: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes through a column."""
        return self.nodes[node][column :: self.columns]

    def exchange(
        self,
        exchange: Exchange,
        source: Array,
        target: Array,
        *,
        arithmetic: Arithmetic | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """Exchange among the node's ranks; straight out of symmetric `source` arrays where `offsets` are given.

        They say where what this rank takes begins in each rank's array.
        """
        group, size = self.group, len(self.ranks)
        if size == 1:
            (begin, length), (to, _) = exchange.sends[0], exchange.takes[0]
            if length and address_of(source) + begin != address_of(target) + to:
                target.view(np.uint8)[to : to + length] = source.view(np.uint8)[begin : begin + length]
            return
        self._step += 1
        # The text says all that distinguishes this call from others, so the tables can be kept.
        key = ("hierarchy", self.text, self._step)
        call = group.node_path.template(key, lambda: NodeCall.exchange(group, self.text, exchange, arithmetic))
        place = group.symmetric_place(source) if offsets is not None and exchange.longest > SMALL_BYTES else None
        if place is None or offsets is None:
            call.run_at(address_of(source), address_of(target))
        else:
            inputs = [base + offset for base, offset in zip(place[1], offsets, strict=True)]
            call.on_symmetric(place[0], address_of(source), address_of(target), inputs).run()

    def padded(self, parts: Sequence[Range]) -> list[Range]:
        """Return the parts for the first places, and nothing for the others."""
        return [*parts, *[_NOTHING] * (len(self.ranks) - len(parts))]

    def network(
        self,
        verb: str,
        arrays: Sequence[Array],
        layouts: Sequence[Layout],
        *,
        root: int = 0,
        reducer: Reducer | None = None,
    ) -> None:
        """Run a verb among this rank's column, one chunk (or one array, split evenly) for each node."""
        column = self.group.column
        assert column is not None
        self._part += 1
        nbytes = layouts[0].count * arrays[0].itemsize
        choice = self.group.choose(verb, "auto", column.size, nbytes, sharing=self.columns)
        pipelined = find(verb, choice.algorithm).segmented
        segments = choice.segments if pipelined else 1
        run = program(verb, choice.algorithm, column.rank, column.size, root=root, segments=segments)
        pieces = 1 if pipelined else choice.segments
        if verb in ("all_reduce", "broadcast"):
            regions = [[Region(arrays[0], layout)] for layout in blocks(len(arrays[0]), run.regions[0], pieces)]
        else:
            if not run.sends_single_chunks:
                pieces = 1
            slices = [cut(layout, pieces) for layout in layouts]
            regions = [[Region(a, s[piece]) for a, s in zip(arrays, slices, strict=True)] for piece in range(pieces)]
        self.group.execute(run, regions, self.text, reducer, part=self._part, transport=column)

    def small_all_reduce(self, part: Array, accumulation: Accumulation) -> None:
        """All-reduce a few elements among this rank's column, by messages that are set up once."""
        column = self.group.column
        assert column is not None
        choice = self.group.choose("all_reduce", "auto", column.size, part.nbytes, sharing=self.columns)
        run = program("all_reduce", choice.algorithm, column.rank, column.size)
        operation = accumulation.arithmetic.operation
        self.group.small_all_reduce(self.text, len(part), part.dtype, operation, run, column).run(part, part)

    def gather_shares(self, target: Array, shares: Sequence[Range]) -> None:
        """Give every rank the shares that the columns have."""
        own = shares[self.place] if self.on_network else _NOTHING
        exchange = Exchange([own], self.padded(shares), max(length for _, length in shares))
        offsets = [offset for offset, _ in self.padded(shares)]
        self.exchange(exchange, target, target, offsets=offsets)


def all_reduce(group: Group, accumulation: Accumulation, target: Array, text: str) -> None:
    """Reduce-scatter in the node, all-reduce in each column, all-gather in the node."""
    x = accumulation.x
    node = _Node(group, text, x.nbytes)
    # The columns' slices; in the node's shared memory the work may be anywhere, so it is where the result goes.
    work = x if accumulation.widened else target
    layout = even(len(x), node.columns)
    shares = ranges(layout, x.itemsize)
    own = shares[node.place] if node.on_network else _NOTHING
    sends = node.padded(shares) if len(node.ranks) > 1 else [shares[0]]
    exchange = Exchange(sends, [own] * len(node.ranks), max(length for _, length in shares))
    node.exchange(exchange, x, work, arithmetic=accumulation.arithmetic, offsets=[own[0]] * len(node.ranks))
    if node.on_network:
        start, stop = layout.slice_of(node.place)
        part = work[start:stop]
        if part.nbytes <= PREPARED_BYTES:
            node.small_all_reduce(part, accumulation)
        else:
            node.network("all_reduce", [part], [even(len(part), 1)], reducer=accumulation.reducer)
        accumulation.finish(part, target[start:stop])
    node.gather_shares(target, ranges(layout, target.itemsize))


def broadcast(group: Group, x: Array, root: int, text: str) -> None:
    """Scatter in the root's node, broadcast in each column, all-gather in the nodes."""
    node = _Node(group, text, x.nbytes)
    layout = even(len(x), node.columns)
    shares = ranges(layout, x.itemsize)
    home = group.topology.node(root)
    if node.number == home:
        source = node.ranks.index(root)
        own = shares[node.place] if node.on_network and group.rank != root else _NOTHING
        takes = [own if place == source else _NOTHING for place in range(len(node.ranks))]
        sends = node.padded(shares) if group.rank == root else [_NOTHING] * len(node.ranks)
        if len(node.ranks) > 1:
            node.exchange(Exchange(sends, takes, max(length for _, length in shares)), x, x)
    if node.on_network:
        start, stop = layout.slice_of(node.place)
        part = x[start:stop]
        node.network("broadcast", [part], [even(len(part), 1)], root=home)
    node.gather_shares(x, shares)


def _column_layout(node: _Node, column: int, counts: Sequence[int]) -> Layout:
    """Return where each rank's chunk of one column lies in it, node by node; `counts[r]` elements for rank r."""
    members = [rank for number in range(len(node.nodes)) for rank in node.in_column(number, column)]
    return uneven(counts[rank] for rank in members)


def _by_node(node: _Node, column: int, counts: Sequence[int]) -> Layout:
    """Return the same column in one chunk for each node."""
    return uneven(sum(counts[rank] for rank in node.in_column(number, column)) for number in range(len(node.nodes)))


def reduce_scatter(group: Group, accumulation: Accumulation, layout: Layout, target: Array, text: str) -> None:
    """Reduce in the node what each column stands for, reduce-scatter in each column, hand on in the node."""
    x, counts = accumulation.x, layout.counts
    node = _Node(group, text, x.nbytes)
    size, item, chunks = len(node.ranks), x.itemsize, ranges(layout, x.itemsize)
    longest = max(counts) * item
    column = node.place if node.on_network else 0
    own_column = _column_layout(node, column, counts)
    scratch = np.empty(own_column.count if node.on_network else 0, x.dtype)
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.columns):  # one rank of that node for each column
            receivers = ranks[layer : layer + node.columns]
            sends = node.padded([chunks[rank] for rank in receivers])
            takes_part = node.on_network and node.place < len(receivers)
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
    if node.on_network:
        own = _by_node(node, column, counts)
        node.network("reduce_scatter", [scratch], [own], reducer=accumulation.reducer)
        start, stop = own.slice_of(node.number)
        part = scratch[start:stop]
        reduced = np.empty(len(part), target.dtype)
        accumulation.finish(part, reduced)
    else:
        reduced = np.empty(0, target.dtype)
    _hand_on(node, reduced, counts, target)


def _hand_on(node: _Node, held: Array, counts: Sequence[int], target: Array) -> None:
    """Give each rank of the node its chunk, which the rank of its column has."""
    item = target.itemsize
    sends = [_NOTHING] * len(node.ranks)
    if node.on_network:
        position = 0
        for rank in node.in_column(node.number, node.place):
            sends[node.ranks.index(rank)] = (position * item, counts[rank] * item)
            position += counts[rank]
    giver = node.place % node.columns
    takes = [(0, target.nbytes) if place == giver else _NOTHING for place in range(len(node.ranks))]
    node.exchange(Exchange(sends, takes, max(counts) * item), held, target)


def all_gather(group: Group, x: Array, target: Array, text: str) -> None:
    """Collect in the node what each column stands for, all-gather in each column, gather in the node."""
    node = _Node(group, text, x.nbytes * group.size)
    size, nbytes, count = len(node.ranks), x.nbytes, len(x)
    counts = [count] * group.size
    column = node.place if node.on_network else 0
    own_column = _by_node(node, column, counts)
    scratch = np.empty(own_column.count if node.on_network else 0, x.dtype)
    begin = own_column.offsets[node.number] * x.itemsize
    giver = node.place % node.columns
    sends = [(0, nbytes) if place == giver else _NOTHING for place in range(size)]
    takes = [_NOTHING] * size
    if node.on_network:
        for index, rank in enumerate(node.in_column(node.number, node.place)):
            takes[node.ranks.index(rank)] = (begin + index * nbytes, nbytes)
    node.exchange(Exchange(sends, takes, nbytes), x, scratch)
    if node.on_network:
        node.network("all_gather", [scratch], [own_column])
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.columns):
            members = ranks[layer : layer + node.columns]
            has_one = node.on_network and node.place < len(members)
            send = (position, nbytes) if has_one else _NOTHING
            position += send[1]
            node.exchange(
                Exchange([send], node.padded([(rank * nbytes, nbytes) for rank in members]), nbytes), scratch, target
            )


def all_to_all(group: Group, x: Array, target: Array, text: str) -> None:
    """Collect in the node what goes through each column, exchange in each column, hand on in the node."""
    node = _Node(group, text, x.nbytes)
    size, item, chunk = len(node.ranks), x.itemsize, len(x) // group.size
    nbytes = chunk * item
    # For each node: the chunks of all ranks here for its ranks in my column, receiver by receiver.
    column = node.place if node.on_network else 0
    receivers = [len(node.in_column(number, column)) if node.on_network else 0 for number in range(len(node.nodes))]
    outgoing = uneven(number * size * chunk for number in receivers)
    leaving = np.empty(outgoing.count, x.dtype)
    position = 0
    for ranks in node.nodes:
        for layer in range(0, len(ranks), node.columns):
            members = ranks[layer : layer + node.columns]
            sends = node.padded([(rank * nbytes, nbytes) for rank in members])
            takes = [_NOTHING] * size
            if node.on_network and node.place < len(members):
                takes = [(position + place * nbytes, nbytes) for place in range(size)]
                position += size * nbytes
            node.exchange(Exchange(sends if size > 1 else sends[:1], takes, nbytes), x, leaving)
    here = receivers[node.number]
    incoming = uneven(here * len(ranks) * chunk for ranks in node.nodes)
    arrived = np.empty(incoming.count, x.dtype)
    if node.on_network:
        node.network("all_to_all", [leaving, arrived], [outgoing, incoming])
    # From each node: for each of my column's ranks here, the chunks of all ranks there.
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
    node = _Node(group, text, 0)
    meeting = Exchange([_NOTHING], [_NOTHING] * len(node.ranks), 0)
    nothing = np.empty(0, np.uint8)
    node.exchange(meeting, nothing, nothing)
    if node.on_network:
        assert group.column is not None
        steps = program("barrier", "dissemination", group.column.rank, group.column.size)
        group.execute(steps, [[]], text, transport=group.column)
    node.exchange(meeting, nothing, nothing)
