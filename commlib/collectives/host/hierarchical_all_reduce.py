"""All-reduce of a group on several nodes: while one part is on the network, the node combines the next.

See `hierarchical` for the steps of one part; those of several overlap.
"""

from __future__ import annotations

import itertools
from functools import partial
from math import ceil

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.host.rails import Rails, on_rails
from commlib.collectives.host.scheduled import choose, persistent
from commlib.collectives.paths import Move
from commlib.dtypes import Array
from commlib.execution.accumulation import Accumulation, is_in_halves, wide_bytes
from commlib.execution.persistent import PERSISTENT_BYTES, PersistentAllReduce
from commlib.execution.reduce_op import ReduceOp
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, NodeCollective, Range, ranges
from commlib.node.signature import signature
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, even

# What a rail reduces while its node combines the next part: several blocks for the executor.
PART_BYTES = 1 << 20


def all_reduce(group: Group, call: Call) -> Move:
    """Reduce-scatter in the node, all-reduce in each rail, all-gather in the node, each of some part of the data."""
    if call.nbytes <= PERSISTENT_BYTES and not is_in_halves(call.dtype, call.op):
        return persistent(group, call.text, partial(_small_all_reduce, group, call))
    return on_rails(group, call, wide_bytes(call.count, call.dtype, call.op), _all_reduce)


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
        self._whole = even(len(x), max(1, x.nbytes // (node.rails * PART_BYTES)))
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
