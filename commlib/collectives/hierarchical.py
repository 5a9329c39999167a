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
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.by_messages import MessageCall
from commlib.collectives.call import Call
from commlib.collectives.operands import row_layout
from commlib.collectives.paths import Move, Verb
from commlib.collectives.rails import Rails
from commlib.collectives.scheduled import choose, persistent
from commlib.dtypes import NUMPY, Array
from commlib.execution.accumulation import Accumulation, wide_dtype
from commlib.execution.persistent import PERSISTENT_BYTES, PersistentAllReduce
from commlib.execution.reduce_op import ReduceOp
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, NodeCollective, Range, ranges
from commlib.runtime.compiled import Compiled
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, even, uneven
from commlib.signature import signature

# Of an all-reduce, what a rail reduces while its node combines the next part: several blocks for the executor.
_PART_BYTES = 1 << 20


class Hierarchical:
    """See `paths.Path`."""

    name, is_automatic = "hierarchical", True

    def refusal(self, group: Group, verb: Verb, call: Call) -> str:
        if not group.is_hierarchical:
            return f"{group.name} is on one node, has one rank on each, or COMMLIB_NODE_PATH=0"
        return "" if verb.hierarchical is not None else "it has no hierarchical form"

    def compile(self, group: Group, verb: Verb, call: Call) -> Compiled:
        assert verb.hierarchical is not None
        return MessageCall(group, call.text, verb.hierarchical(group, call))


Run = Callable[[Call, Rails, Array, Array], None]


def _move(group: Group, call: Call, nbytes: int, run: Run) -> Move:
    """Return what does `run` on the rails that a call of so many bytes uses; they are found when it first runs."""
    made: list[Rails] = []

    def move(x: Array, target: Array) -> None:
        if not made:
            made.append(Rails(group, call.text, nbytes))
        made[0].begin()
        run(call, made[0], x, target)

    return move


def _wide_bytes(call: Call) -> int:
    return call.count * NUMPY[wide_dtype(call.dtype, call.op)].itemsize


def all_reduce(group: Group, call: Call) -> Move:
    """Reduce-scatter in the node, all-reduce in each rail, all-gather in the node, each of some part of the data."""
    if call.nbytes <= PERSISTENT_BYTES:
        return persistent(group, call.text, partial(_small_all_reduce, group, call))
    return _move(group, call, _wide_bytes(call), _all_reduce)


def _all_reduce(call: Call, node: Rails, source: Array, target: Array) -> None:
    """While one part is on the network, the node combines the next one and gathers the last."""
    accumulation = Accumulation(source, call.op, node.group.size)
    x = accumulation.x
    # The rails' slices; in the node's shared memory the work may be anywhere, so it is where the result goes.
    work = x if accumulation.widened else target
    parts = _Parts(node, x)

    def combine(number: int) -> None:
        where, shares = parts.ranges[number], parts.shares(number, x.itemsize)
        own = shares[node.place] if node.on_rail else NOTHING
        sends = node.padded(shares) if len(node.ranks) > 1 else [shares[0]]
        size = len(node.ranks)
        longest = max(length for _, length in shares)
        exchange = Exchange(sends, [own] * size, longest, [own[0]] * size, x[where].nbytes)
        kind = "combine", where.stop - where.start
        node.exchange(exchange, x[where], work[where], op=accumulation.reduce_op, kind=kind)

    def gather(number: int) -> None:
        where, shares = parts.ranges[number], parts.shares(number, target.itemsize)
        if node.on_rail:
            mine = parts.slice(number)
            accumulation.finish(work[mine], target[mine])
        node.gather_shares(target[where], shares, ("gather", where.stop - where.start))

    node.group.execute(
        parts.program,
        [[Region(work, layout)] for number in range(len(parts.ranges)) for layout in parts.blocks(number)],
        call.text,
        accumulation.reduce_op,
        part=1,
        transport=node.hierarchy.rail if node.on_rail else None,
        before=lambda block: combine(block // parts.pieces) if block % parts.pieces == 0 else None,
        after=lambda block: gather(block // parts.pieces) if (block + 1) % parts.pieces == 0 else None,
    )


class _Parts:
    """How an all-reduce goes through the nodes and the network part by part: the same number of blocks on all ranks.

    `ranges` are the parts' elements in the whole, `pieces` the blocks in which a rail reduces its slice of a part.
    """

    def __init__(self, node: Rails, x: Array) -> None:
        self._node, group, nodes = node, node.group, len(node.nodes)
        self._whole = even(len(x), max(1, x.nbytes // (node.rails * _PART_BYTES)))
        starts = self._whole.offsets
        self.ranges = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        # Of the longest slice of any rail: its number of blocks is that of all.
        nbytes = even(len(x), node.rails).counts[0] * x.itemsize
        choice = choose(group, "all_reduce", "auto", nodes, nbytes, sharing=node.rails)
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


def _small_all_reduce(group: Group, call: Call) -> PersistentAllReduce:
    """Return the same over one rail, set up once: each node's first rank combines, exchanges and hands out."""
    hierarchy, text = group.hierarchy, call.text
    small = PersistentAllReduce(ReduceOp.of(call.dtype, call.op, group.size), call.count)
    size, is_first = len(hierarchy.ranks), hierarchy.place == 0
    at, everything = address_of(small.buffer), (0, small.buffer.nbytes)
    if size > 1:
        sum_up = Exchange([everything], [everything if is_first else NOTHING] * size, everything[1])
        combine = NodeCollective.exchange(group.open(), text, sum_up, small.combine)
        small.then(lambda: combine.run_at(at, at))
    if is_first:
        rail = hierarchy.rail
        assert rail is not None
        choice = choose(group, "all_reduce", "auto", rail.size, everything[1])
        steps = program("all_reduce", choice.algorithm, rail.rank, rail.size)
        small.then_messages(steps, rail, signature(text), group.on_wait(text))
    if size > 1:
        takes = [everything if other == 0 and not is_first else NOTHING for other in range(size)]
        spread = NodeCollective.exchange(
            group.open(), text, Exchange([everything if is_first else NOTHING], takes, everything[1])
        )
        small.then(lambda: spread.run_at(at, at))
    return small


def broadcast(group: Group, call: Call) -> Move:
    """Scatter in the root's node, broadcast in each rail, all-gather in the nodes."""
    return _move(group, call, call.nbytes, _broadcast)


def _broadcast(call: Call, node: Rails, x: Array, target: Array) -> None:
    group, root = node.group, call.root
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


def _rail_layout(node: Rails, rail: int, counts: Sequence[int]) -> Layout:
    """Return where each rank's chunk of one rail lies in it, node by node; `counts[r]` elements for rank r."""
    members = [rank for number in range(len(node.nodes)) for rank in node.on_same_rail(number, rail)]
    return uneven(counts[rank] for rank in members)


def _by_node(node: Rails, rail: int, counts: Sequence[int]) -> Layout:
    """Return the same rail in one chunk for each node."""
    return uneven(sum(counts[rank] for rank in node.on_same_rail(number, rail)) for number in range(len(node.nodes)))


def reduce_scatter(group: Group, call: Call) -> Move:
    """Reduce in the node what each rail stands for, reduce-scatter in each rail, hand on in the node."""
    return _move(group, call, _wide_bytes(call), _reduce_scatter)


def _reduce_scatter(call: Call, node: Rails, source: Array, target: Array) -> None:
    assert isinstance(call.size, tuple)
    layout = row_layout(call.size, node.group.size)
    accumulation = Accumulation(source, call.op, node.group.size)
    x, counts = accumulation.x, layout.counts
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
            exchange = Exchange(sends, [take] * size, longest, [start] * size, x.nbytes)
            node.exchange(exchange, x, scratch, op=accumulation.reduce_op)
            position += length
    if node.on_rail:
        own = _by_node(node, rail, counts)
        node.network("reduce_scatter", [scratch], [own], op=accumulation.reduce_op)
        start, stop = own.slice_of(node.number)
        part = scratch[start:stop]
        reduced = np.empty(len(part), target.dtype)
        accumulation.finish(part, reduced)
    else:
        reduced = np.empty(0, target.dtype)
    _hand_on(node, reduced, counts, target)


def _hand_on(node: Rails, held: Array, counts: Sequence[int], target: Array) -> None:
    """Give each rank of the node its chunk, which the rank of its rail has."""
    item = target.itemsize
    sends = [NOTHING] * len(node.ranks)
    if node.on_rail:
        position = 0
        for rank in node.on_same_rail(node.number, node.place):
            sends[node.ranks.index(rank)] = (position * item, counts[rank] * item)
            position += counts[rank]
    giver = node.place % node.rails
    takes = [(0, target.nbytes) if place == giver else NOTHING for place in range(len(node.ranks))]
    node.exchange(Exchange(sends, takes, max(counts) * item), held, target)


def all_gather(group: Group, call: Call) -> Move:
    """Collect in the node what each rail stands for, all-gather in each rail, gather in the node."""
    return _move(group, call, call.nbytes * group.size, _all_gather)


def _all_gather(call: Call, node: Rails, x: Array, target: Array) -> None:
    group = node.group
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
        for index, rank in enumerate(node.on_same_rail(node.number, node.place)):
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


def all_to_all(group: Group, call: Call) -> Move:
    """Collect in the node what goes over each rail, exchange in each rail, hand on in the node."""
    return _move(group, call, call.nbytes, _all_to_all)


def _all_to_all(call: Call, node: Rails, x: Array, target: Array) -> None:
    group = node.group
    size, item, chunk = len(node.ranks), x.itemsize, len(x) // group.size
    nbytes = chunk * item
    # For each node: the chunks of all ranks here for its ranks in my rail, receiver by receiver.
    rail = node.place if node.on_rail else 0
    receivers = [len(node.on_same_rail(number, rail)) if node.on_rail else 0 for number in range(len(node.nodes))]
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


def barrier(group: Group, call: Call) -> Move:
    """Meet in the node, then between the nodes, then in the node again."""
    return _move(group, call, 0, _barrier)


def _barrier(call: Call, node: Rails, x: Array, target: Array) -> None:
    meeting = Exchange([NOTHING], [NOTHING] * len(node.ranks), 0)
    node.exchange(meeting, x, target)
    if node.on_rail:
        rail = node.hierarchy.rail
        assert rail is not None
        steps = program("barrier", "dissemination", rail.rank, rail.size)
        node.group.execute(steps, [[]], call.text, transport=rail)
    node.exchange(meeting, x, target)
