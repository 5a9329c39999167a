"""Rails: the steps of one hierarchical call, exchanges within this rank's node and verbs between the nodes.

The compiled exchanges of a call and their tables are made once; a later run finds them by their number in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.host.schedule_path import choose
from commlib.collectives.paths import Move
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.dtypes import Array
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import NOTHING, Exchange, NodeCollective, Range
from commlib.schedule import find, program
from commlib.schedule.layout import Layout, blocks, cut


class Rails:
    """This rank's node, and the rails that a call of `nbytes` uses."""

    def __init__(self, group: Group, text: str, nbytes: int) -> None:
        self.group, self.text = group, text
        self.hierarchy = group.hierarchy
        self.number, self.place, self.ranks = self.hierarchy.number, self.hierarchy.place, self.hierarchy.ranks
        self.nodes = group.topology.nodes
        self.rails = max(1, min(group.topology.rails, nbytes // RAIL_BYTES))
        self.on_rail = self.place < self.rails
        self._context = group.open() if len(self.ranks) > 1 else None
        self._exchanges: dict[Hashable, NodeCollective] = {}
        self._part = self._step = 0

    def begin(self) -> None:
        """Begin a run of the call: restart the numbers of exchanges and parts."""
        self._part = self._step = 0

    def on_same_rail(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data goes over a rail."""
        return self.nodes[node][rail :: self.rails]

    def exchange(
        self,
        exchange: Exchange,
        source: Array,
        target: Array,
        *,
        op: ReduceFunction | None = None,
        kind: Hashable = None,
    ) -> None:
        """Exchange among the node's ranks. Exchanges with the same `kind` share their tables."""
        if self._context is None:
            (begin, length), (to, _) = exchange.sends[0], exchange.takes[0]
            if length and address_of(source) + begin != address_of(target) + to:
                target.view(np.uint8)[to : to + length] = source.view(np.uint8)[begin : begin + length]
            return
        self._step += 1
        key = self._step if kind is None else kind
        call = self._exchanges.get(key)
        if call is None:
            call = self._exchanges[key] = NodeCollective.exchange(self._context, self.text, exchange, op)
        call.run_at(address_of(source), address_of(target))

    def padded(self, parts: Sequence[Range]) -> list[Range]:
        """Return `parts` for the first local ranks, and NOTHING for the rest of the node."""
        return [*parts, *[NOTHING] * (len(self.ranks) - len(parts))]

    def network(
        self,
        verb: str,
        arrays: Sequence[Array],
        layouts: Sequence[Layout],
        *,
        root: int = 0,
        op: ReduceFunction | None = None,
        nbytes: int | None = None,
    ) -> None:
        """Run a verb among this rank's rail, with one chunk for each node, or with one array, split evenly.

        nbytes: the size by which to choose the algorithm, the same on all ranks of the rail; by default that of the
        first layout.
        """
        rail = self.hierarchy.rail
        assert rail is not None
        self._part += 1
        if nbytes is None:
            nbytes = layouts[0].count * arrays[0].itemsize
        choice = choose(self.group, verb, "auto", rail.size, nbytes, sharing=self.rails)
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
        self.group.programs.execute(run, regions, self.text, op, part=self._part, transport=rail)

    def gather_shares(self, target: Array, shares: Sequence[Range], kind: Hashable = None) -> None:
        """All-gather the rails' shares to every rank of the node."""
        own = shares[self.place] if self.on_rail else NOTHING
        takes = self.padded(shares)
        offsets = [offset for offset, _ in takes]
        exchange = Exchange([own], takes, max(length for _, length in shares), offsets, target.nbytes)
        self.exchange(exchange, target, target, kind=kind)


Run = Callable[[Call, Rails, Array, Array], None]


def make_rails_move(group: Group, call: Call, nbytes: int, run: Run) -> Move:
    """Return a Move that runs `run` on the rails for a call of `nbytes`. The first run sets them up."""
    rails: list[Rails] = []

    def move(x: Array, target: Array) -> None:
        if not rails:
            rails.append(Rails(group, call.text, nbytes))
        rails[0].begin()
        run(call, rails[0], x, target)

    return move
