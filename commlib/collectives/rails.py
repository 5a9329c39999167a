"""This rank's node in one call of a hierarchy: who is on it, its rails, exchanges in it and verbs between nodes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from commlib.buffers.views import address_of
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.dtypes import Array
from commlib.execution.streaming import Reducer, Region
from commlib.node.call import Arithmetic, Exchange, NodeCollective, Range
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, cut

if TYPE_CHECKING:
    from commlib.group.group import Group

NOTHING: Range = (0, 0)


class Node:
    """This rank's node in one call: who is on it, and how its ranks exchange."""

    def __init__(self, group: Group, text: str, nbytes: int) -> None:
        topology = group.topology
        self.group, self.text = group, text
        self.number = topology.node(group.rank)
        self.ranks = topology.nodes[self.number]
        self.nodes = topology.nodes
        self.place = self.ranks.index(group.rank)
        self.rails = max(1, min(topology.rails, nbytes // RAIL_BYTES))
        self.on_rail = self.place < self.rails
        self._part = self._step = 0

    def in_rail(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes through a rail."""
        return self.nodes[node][rail :: self.rails]

    def exchange(
        self,
        exchange: Exchange,
        source: Array,
        target: Array,
        *,
        arithmetic: Arithmetic | None = None,
        offsets: Sequence[int] | None = None,
        kind: Hashable = None,
    ) -> None:
        """Exchange among the node's ranks; straight out of symmetric `source` arrays where `offsets` are given.

        They say where what this rank takes begins in each rank's array. `kind` is the same for those exchanges of one
        verb that may share their tables.
        """
        group, size = self.group, len(self.ranks)
        if size == 1:
            (begin, length), (to, _) = exchange.sends[0], exchange.takes[0]
            if length and address_of(source) + begin != address_of(target) + to:
                target.view(np.uint8)[to : to + length] = source.view(np.uint8)[begin : begin + length]
            return
        self._step += 1
        # The text says all that distinguishes this call from others, so the tables can be kept.
        key = ("hierarchy", self.text, self._step if kind is None else kind)
        call = group.node_calls.template(key, lambda: NodeCollective.exchange(group, self.text, exchange, arithmetic))
        begin, into, placed = address_of(source), address_of(target), None
        if offsets is not None:
            placed = group.node_calls.placed_exchange(call, source, begin, into, offsets)
        if placed is not None:
            placed.run()
        else:
            call.run_at(begin, into)

    def padded(self, parts: Sequence[Range]) -> list[Range]:
        """Return the parts for the first places, and nothing for the others."""
        return [*parts, *[NOTHING] * (len(self.ranks) - len(parts))]

    def network(
        self,
        verb: str,
        arrays: Sequence[Array],
        layouts: Sequence[Layout],
        *,
        root: int = 0,
        reducer: Reducer | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Run a verb among this rank's rail, one chunk (or one array, split evenly) for each node.

        nbytes: by what to choose the algorithm, the same on all ranks of the rail; by default what the first array
        has, where that is.
        """
        rail = self.group.rail
        assert rail is not None
        self._part += 1
        if nbytes is None:
            nbytes = layouts[0].count * arrays[0].itemsize
        choice = self.group.choose(verb, "auto", rail.size, nbytes, sharing=self.rails)
        pipelined = find(verb, choice.algorithm).segmented
        segments = choice.segments if pipelined else 1
        run = program(verb, choice.algorithm, rail.rank, rail.size, root=root, segments=segments)
        pieces = 1 if pipelined else choice.segments
        if verb in ("all_reduce", "broadcast"):
            regions = [[Region(arrays[0], layout)] for layout in blocks(len(arrays[0]), run.regions[0], pieces)]
        else:
            if not run.sends_single_chunks:
                pieces = 1
            slices = [cut(layout, pieces) for layout in layouts]
            regions = [[Region(a, s[piece]) for a, s in zip(arrays, slices, strict=True)] for piece in range(pieces)]
        self.group.execute(run, regions, self.text, reducer, part=self._part, transport=rail)

    def gather_shares(self, target: Array, shares: Sequence[Range], kind: Hashable = None) -> None:
        """Give every rank the shares that the rails have."""
        own = shares[self.place] if self.on_rail else NOTHING
        exchange = Exchange([own], self.padded(shares), max(length for _, length in shares))
        offsets = [offset for offset, _ in self.padded(shares)]
        self.exchange(exchange, target, target, offsets=offsets, kind=kind)
