"""Hierarchical all-reduce: while one part of the data crosses the network, the node combines the next part.

`hierarchical` describes the steps of one part. Here the steps of several parts overlap.
"""

from __future__ import annotations

import itertools
from functools import partial
from math import ceil

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.host.rails import Rails, make_rails_move
from commlib.collectives.host.schedule_path import choose, make_persistent_move
from commlib.collectives.paths import Move
from commlib.dtypes import Array
from commlib.execution.accumulation import Accumulation, is_in_halves, wide_bytes
from commlib.execution.persistent_programs import PERSISTENT_BYTES, PersistentAllReduce
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, NodeCollective, Range, ranges
from commlib.node.signature import signature
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, even

# Bytes of a part on each rail, enough for several blocks of the executor.
PART_BYTES = 1 << 20


def all_reduce(group: Group, call: Call) -> Move:
    """Reduce-scatter in the node, all-reduce in each rail and all-gather in the node, part by part."""
    if call.nbytes <= PERSISTENT_BYTES and not is_in_halves(call.dtype, call.op):
        return make_persistent_move(group, call.text, partial(_small_all_reduce, group, call))
    return make_rails_move(group, call, wide_bytes(call.count, call.dtype, call.op), _all_reduce)


def _all_reduce(call: Call, node: Rails, source: Array, target: Array) -> None:
    """Overlap three parts: one crosses the network, the node combines the next and gathers the previous one."""
    accumulation = Accumulation(source, call.op, node.group.size)
    x = accumulation.x
    # The rails' slices are reduced here. The node path accepts any memory, so use the result's if the dtype fits.
    work = x if accumulation.widened else target
    parts = _PartSplit(node, x)

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

    node.group.programs.execute(
        parts.program,
        [[Region(work, layout)] for number in range(len(parts.ranges)) for layout in parts.blocks(number)],
        call.text,
        accumulation.reduce_op,
        part=1,
        transport=node.hierarchy.rail if node.on_rail else None,
        before=lambda block: combine(block // parts.pieces) if block % parts.pieces == 0 else None,
        after=lambda block: gather(block // parts.pieces) if (block + 1) % parts.pieces == 0 else None,
    )


class _PartSplit:
    """The split of an all-reduce into parts, and of each part into blocks: the same numbers on all ranks.

    ranges: the elements of each part. pieces: the blocks in which a rail reduces its slice of a part.
    """

    def __init__(self, node: Rails, x: Array) -> None:
        self._node, group, nodes = node, node.group, len(node.nodes)
        self._whole = even(len(x), max(1, x.nbytes // (node.rails * PART_BYTES)))
        starts = self._whole.offsets
        self.ranges = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
        # The longest slice of any rail decides the number of blocks on all rails.
        nbytes = even(len(x), node.rails).counts[0] * x.itemsize
        choice = choose(group, "all_reduce", "auto", nodes, nbytes, sharing=node.rails)
        each = ceil(choice.segments / len(self.ranges))
        pipelined = find("all_reduce", choice.algorithm).segmented
        self.pieces = 1 if pipelined else each
        rank, size = (node.number, nodes) if node.on_rail else (0, 1)  # off the rails there is nothing to send
        self.program = program("all_reduce", choice.algorithm, rank, size, segments=each if pipelined else 1)

    def _layout(self, number: int) -> Layout:
        where = self.ranges[number]
        return even(where.stop - where.start, self._node.rails)

    def shares(self, number: int, item_bytes: int) -> list[Range]:
        """Return each rail's slice of a part, in bytes from the start of the part."""
        return ranges(self._layout(number), item_bytes)

    def slice(self, number: int) -> slice:
        """Return the slice of a part for this rank's rail, in elements from the start of the data."""
        start, stop = self._layout(number).slice_of(self._node.place)
        first = self.ranges[number].start
        return slice(first + start, first + stop)

    def blocks(self, number: int) -> list[Layout]:
        """Return the blocks of this rank's slice of a part, for the program; empty blocks if the rank is on no rail."""
        mine = self.slice(number) if self._node.on_rail else slice(0, 0)
        cuts = blocks(mine.stop - mine.start, self.program.regions[0], self.pieces)
        return [Layout(tuple(mine.start + offset for offset in layout.offsets)) for layout in cuts]


def _small_all_reduce(group: Group, call: Call) -> PersistentAllReduce:
    """Prepare a small all-reduce over one rail: each node's first rank combines, exchanges and distributes."""
    hierarchy, text = group.hierarchy, call.text
    small = PersistentAllReduce(ReduceFunction.of(call.dtype, call.op, group.size), call.count)
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
        small.add_messages(steps, rail, signature(text), group.waits.watch_each(text))
    if size > 1:
        takes = [everything if other == 0 and not is_first else NOTHING for other in range(size)]
        spread = NodeCollective.exchange(
            group.open(), text, Exchange([everything if is_first else NOTHING], takes, everything[1])
        )
        small.then(lambda: spread.run_at(at, at))
    return small
