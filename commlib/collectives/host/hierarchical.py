"""Hierarchical path: collectives of groups on several nodes, by shared memory within and messages between nodes.

`schedule.hierarchy` has the steps. All of them run within one operation. In an all-reduce of large arrays one part of
the data crosses the network, while the node combines the next part and gathers the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.executor import CallPiece, run
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.host.node_exchanges import LocalCopy, copies_of, group_transfers, make_exchanges
from commlib.collectives.host.schedule_path import make_persistent_move
from commlib.collectives.host.small_all_reduce import small_all_reduce
from commlib.collectives.paths import Move, Path, Verb
from commlib.collectives.rails import Rails
from commlib.dtypes import WORKING, Array
from commlib.execution.accumulation import Accumulation, is_in_halves, is_widened, wide_dtype
from commlib.execution.persistent_programs import PERSISTENT_BYTES
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Hook
from commlib.group.group import Group
from commlib.node.collective import NodeCollective
from commlib.runtime.compiled_call import CompiledCall
from commlib.schedule.hierarchy import NodeStep, Run, Transfer
from commlib.schedule.layout import even, uneven
from commlib.schedule.rail_map import Buffer

# Bytes of a part on each rail, enough for several blocks of the executor.
PART_BYTES = 1 << 20

ArrayMove = tuple[NodeCollective | LocalCopy, Buffer, Buffer]
"""An exchange or copies, and the names of the arrays that it reads and writes."""


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
        group = context.group
        return MessageCall(group, call.text, _make_move(group, call, verb.hierarchical(call, group.size)))


def _make_move(group: Group, call: Call, counts: tuple[int, ...]) -> Move:
    if call.verb == "all_reduce" and call.nbytes <= PERSISTENT_BYTES and not is_in_halves(call.dtype, call.op):
        return make_persistent_move(group, call.text, partial(small_all_reduce, group, call))
    return HostSteps(group, call, counts).run


class HostSteps:
    """A hierarchical call on host arrays. The exchanges of a step are made in its first run and found by number later.

    Where every rank has all of the data, the rail's buffers are its share of the caller's arrays: of the target, or
    before the rail's verb of the wider copy of the source. Otherwise a run allocates them.
    """

    def __init__(self, group: Group, call: Call, counts: tuple[int, ...]) -> None:
        self.group, self.call = group, call
        item = int(call.dtype.itemsize)
        wide = int(WORKING[wide_dtype(call.dtype, call.op)].itemsize) if call.op else item
        rails, longest = Rails(group, call, counts, wide), max(counts, default=0)
        self.steps, self._rails, self._place = rails.steps, rails, group.hierarchy.place
        self.is_whole, self.on_rail = rails.steps.is_whole, rails.steps.rail is not None
        parts = max(1, longest * wide // (rails.number * PART_BYTES)) if call.verb == "all_reduce" else 1
        self._pieces = rails.pieces(even(longest, parts).offsets)
        self.layouts = rails.layouts(self._pieces[0].counts)
        self.own = [self._own(piece) for piece in self._pieces]
        shares = even(longest, rails.number).counts if self.is_whole else counts
        self.rail = rails.compile(shares, self._pieces, [own.start for own in self.own])
        self.items: dict[Buffer, int] = {"source": wide, "outgoing": wide, "target": item, "incoming": item}
        self.work: Buffer = "source" if call.op and is_widened(call.dtype, call.op) else "target"
        self._names: dict[Buffer, Buffer] = {"outgoing": self.work, "incoming": "target"} if self.is_whole else {}
        self.buffers = rails.steps.rail.buffers if rails.steps.rail is not None else ()
        self.moves: dict[tuple[int, int], list[ArrayMove]] = {}
        """The operations of each step on the pieces of each kind."""

    def _own(self, piece: CallPiece) -> slice:
        """Return the part of the rail's first region that is this rail's share, or this node's."""
        if not self.layouts or len(self.layouts) > 1:
            return slice(0, 0)
        if not self.is_whole:
            return slice(*self.layouts[0].slice_of(self._rails.node))
        start, stop = uneven(piece.counts).slice_of(self._place)
        return slice(piece.start + start, piece.start + stop)

    def run(self, x: Array, target: Array) -> None:
        """Run the call, within an operation, on contiguous 1-D arrays."""
        run(self.steps, self._pieces, HostCallMemory(self, x, target))

    def execute(self, regions: Sequence[Array], op: ReduceFunction | None, before: Hook, after: Hook) -> None:
        """Run the rail's verb."""
        self._rails.execute(self.rail, regions, op, before=before, after=after)

    def compile(self, step: NodeStep, piece: CallPiece, op: ReduceFunction | None) -> list[ArrayMove]:
        """Return the operations of a step on pieces of this kind. The first call of a group is collective."""
        ranks, moves = self.group.hierarchy.ranks, list[ArrayMove]()
        context = None if step.is_local else self.group.open()
        elements = self._rails.runs(step, piece, in_place=True)
        runs = [self._bytes(each, run) for each, run in zip(step.transfers, elements, strict=True)]
        for (source, target), pairs in group_transfers(step, runs, ranks, self._names).items():
            if context is None:
                moves.append((copies_of(pairs, self._place), source, target))
                continue
            nbytes = self._nbytes(source, piece)
            for exchange in make_exchanges(pairs, self._place, len(ranks), reduce=step.reduce, nbytes=nbytes):
                collective = NodeCollective.exchange(context, self.call.text, exchange, op if step.reduce else None)
                moves.append((collective, source, target))
        return moves

    def _bytes(self, transfer: Transfer, run: Run) -> Run:
        source, target = self.items[transfer.source.buffer], self.items[transfer.target.buffer]
        return run[0] * source, run[1] * target, run[2] * target

    def _nbytes(self, name: Buffer, piece: CallPiece) -> int | None:
        """Return the bytes of a piece in an array of the caller, which may be in symmetric memory; else None."""
        if name != "source" and name != "target":
            return None
        return self.steps.layout(self.group.rank, name, piece.counts).count * self.items[name]


class HostCallMemory:
    """The `executor.CallMemory` of one run on host arrays."""

    def __init__(self, call: HostSteps, x: Array, target: Array) -> None:
        self._call, self._accumulation, self._op, self._regions = call, None, None, list[Array]()
        if call.call.op:
            self._accumulation = accumulation = Accumulation(x, call.call.op, call.group.size)
            x, self._op = accumulation.x, accumulation.reduce_op
        self._arrays: dict[Buffer, Array] = {"source": x, "target": target}
        if call.is_whole:
            self._regions, self._result = [self._arrays[call.work]] * call.on_rail, target
        elif call.layouts:
            self._allocate(x.dtype, target)
        self._addresses = {name: address_of(array) for name, array in self._arrays.items() if len(array)}

    def _allocate(self, dtype: Any, target: Array) -> None:
        """Allocate the rail's buffers."""
        call, arrays = self._call, self._arrays
        self._regions = [np.empty(layout.count, dtype) for layout in call.layouts]
        arrays.update(zip(call.buffers, self._regions, strict=True))
        if call.buffers == ("outgoing",):
            own = call.own[0]
            arrays["incoming"] = self._result = np.empty(own.stop - own.start, target.dtype)
        elif call.buffers == ("incoming",):
            arrays["outgoing"] = arrays["incoming"][call.own[0]]

    def exchange(self, step: NodeStep, piece: CallPiece) -> None:
        """Run a step of the node."""
        call, addresses, start, key = self._call, self._addresses, piece.start, (id(step), piece.kind)
        moves, items = call.moves.get(key), call.items
        if moves is None:
            moves = call.moves[key] = call.compile(step, piece, self._op)
        for operation, source, target in moves:
            operation.run_at(
                addresses.get(source, 0) + start * items[source], addresses.get(target, 0) + start * items[target]
            )

    def finish(self, piece: CallPiece) -> None:
        """Divide and round what the rail has reduced."""
        if self._accumulation is None:
            return
        own = self._call.own[piece.number]
        result = self._result[own] if self._call.is_whole else self._result
        self._accumulation.finish(self._regions[0][own], result)

    def stream(self, prepare: Hook, complete: Hook) -> None:
        """Run the rail's verb on all pieces, in blocks; several blocks are on the network at once."""
        call, each = self._call, self._call.rail.each
        if not call.on_rail and len(call.own) == 1:
            prepare(0)
            complete(0)
            return
        if each > 1:
            prepare, complete = partial(_at_first, each, prepare), partial(_at_last, each, complete)
        call.execute(self._regions, self._op, prepare, complete)


def _at_first(each: int, hook: Hook, block: int) -> None:
    """Call `hook` with the piece that begins with a block."""
    if block % each == 0:
        hook(block // each)


def _at_last(each: int, hook: Hook, block: int) -> None:
    """Call `hook` with the piece that ends with a block."""
    if (block + 1) % each == 0:
        hook(block // each)
