"""Hierarchical path: collectives of groups on several nodes, by shared memory within and messages between nodes.

Local rank c of every node forms *rail* c (`topology`); there are as many rails as the smallest node has ranks. An
all-reduce takes three steps: reduce-scatter in the node, which gives rail c slice c of the node's sum; all-reduce of
the slices in each rail, over the network; all-gather in the node. No byte crosses the network more often than it must,
and all rails of a node share its network card. The other verbs take those of the three steps that they need.
Source: the hierarchical all-reduce of Jia et al. 2018, "Highly scalable deep learning training system".

Everything runs within one operation. `x` and `target` are contiguous, 1-D.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.host.rails import Rails, make_rails_move
from commlib.collectives.operands import row_layout
from commlib.collectives.paths import Move, Path, Verb
from commlib.dtypes import Array
from commlib.execution.accumulation import Accumulation, wide_bytes
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, ranges
from commlib.runtime.compiled_call import CompiledCall
from commlib.schedule import program
from commlib.schedule.layout import Layout, even, uneven


class HierarchicalPath(Path):
    """The path for groups on several nodes."""

    name = "hierarchical"

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        group = context.group
        if not group.is_hierarchical:
            return f"{group.name} is on one node, has one rank on each, or COMMLIB_NODE_PATH=0"
        return "" if verb.hierarchical is not None else "it has no hierarchical implementation"

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        assert verb.hierarchical is not None
        return MessageCall(context.group, call.text, verb.hierarchical(context.group, call))


def broadcast(group: Group, call: Call) -> Move:
    """Scatter in the root's node, broadcast in each rail, all-gather in the nodes."""
    return make_rails_move(group, call, call.nbytes, _broadcast)


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
    """Return the layout of one rail's buffer, one chunk for each rank, by node; `counts[r]` elements for rank r."""
    members = [rank for number in range(len(node.nodes)) for rank in node.on_same_rail(number, rail)]
    return uneven(counts[rank] for rank in members)


def _by_node(node: Rails, rail: int, counts: Sequence[int]) -> Layout:
    """Return the layout of the same buffer with one chunk for each node."""
    return uneven(sum(counts[rank] for rank in node.on_same_rail(number, rail)) for number in range(len(node.nodes)))


def reduce_scatter(group: Group, call: Call) -> Move:
    """Reduce each rail's chunks in the node, reduce-scatter in each rail, distribute the results in the node."""
    return make_rails_move(group, call, wide_bytes(call.count, call.dtype, call.op), _reduce_scatter)


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
    _distribute(node, reduced, counts, target)


def _distribute(node: Rails, held: Array, counts: Sequence[int], target: Array) -> None:
    """Copy each rank of the node its chunk from the rank that is on its rail."""
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
    """Gather each rail's chunks in the node, all-gather in each rail, all-gather in the node."""
    return make_rails_move(group, call, call.nbytes * group.size, _all_gather)


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
    """Gather the outgoing chunks of each rail in the node, exchange in each rail, distribute in the node."""
    return make_rails_move(group, call, call.nbytes, _all_to_all)


def _all_to_all(call: Call, node: Rails, x: Array, target: Array) -> None:
    group = node.group
    size, item, chunk = len(node.ranks), x.itemsize, len(x) // group.size
    nbytes = chunk * item
    # For each node: the chunks from all ranks of this node to that node's ranks in my rail, receiver by receiver.
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
        # If nodes differ in size, ranks send different amounts; the choice must be the same on all ranks.
        most = max(receivers) * max(map(len, node.nodes)) * len(node.nodes) * nbytes
        node.network("all_to_all", [leaving, arrived], [outgoing, incoming], nbytes=most)
    # From each node: for each rank of my rail on this node, the chunks from all ranks of that node.
    for number, ranks in enumerate(node.nodes):
        send_count = len(ranks) * chunk
        landed = np.empty(send_count, x.dtype)
        counts = [send_count] * group.size
        begin = incoming.offsets[number]
        _distribute(node, arrived[begin : begin + here * send_count], counts, landed)
        for index, rank in enumerate(ranks):
            target[rank * chunk : (rank + 1) * chunk] = landed[index * chunk : (index + 1) * chunk]


def barrier(group: Group, call: Call) -> Move:
    """Synchronize the ranks of each node, then the nodes, then the ranks of each node again."""
    return make_rails_move(group, call, 0, _barrier)


def _barrier(call: Call, node: Rails, x: Array, target: Array) -> None:
    arrival = Exchange([NOTHING], [NOTHING] * len(node.ranks), 0)
    node.exchange(arrival, x, target)
    if node.on_rail:
        rail = node.hierarchy.rail
        assert rail is not None
        steps = program("barrier", "dissemination", rail.rank, rail.size)
        node.group.programs.execute(steps, [[]], call.text, transport=rail)
    node.exchange(arrival, x, target)
