"""Rails: the steps of a hierarchical call on this rank, its pieces, and the verb along the rail on their elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.executor import CallPiece
from commlib.cost.chooser import Choice
from commlib.cost.hierarchical import RAIL_BYTES
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.streaming import Hook, Region, do_nothing
from commlib.group.group import Group
from commlib.schedule import find, program
from commlib.schedule.expansion import rail_algorithms
from commlib.schedule.hierarchy import NodeStep, Run, hierarchical_program
from commlib.schedule.ir import Program
from commlib.schedule.layout import Layout, Slices, blocks, cut, even, uneven
from commlib.schedule.rail_map import Buffer


@dataclass(frozen=True, slots=True)
class RailProgram:
    """The program of a rail's verb, and the layouts of its regions in each block. A rank without a rail sends nothing.

    each: the number of blocks of a piece.
    """

    program: Program
    blocks: Sequence[Sequence[Layout | Slices]]
    each: int


class Rails:
    """The rails of one call, and the steps of this rank. counts: the elements of each chunk, or of all of the data."""

    def __init__(self, group: Group, call: Call, counts: tuple[int, ...], item_bytes: int) -> None:
        self.group, self.text, self.counts = group, call.text, counts
        self.number = max(1, min(group.topology.rails, sum(counts) * item_bytes // RAIL_BYTES))
        nodes, root = group.topology.nodes, max(call.root, 0)
        self.steps = hierarchical_program(call.verb, nodes, self.number, group.rank, root)
        self.node, self._item_bytes = group.hierarchy.number, item_bytes

    def pieces(self, cuts: Sequence[int]) -> tuple[CallPiece, ...]:
        """Return the pieces between these elements, from 0 to the number of elements of the longest chunk."""
        kinds: dict[tuple[int, ...], int] = {}
        pieces = list[CallPiece]()
        for number, (start, stop) in enumerate(pairwise(cuts)):
            if self.steps.is_whole:
                counts = even(stop - start, self.number).counts
            else:
                counts = tuple(max(min(count, stop) - start, 0) for count in self.counts)
            pieces.append(CallPiece(number, start, counts, kinds.setdefault(counts, len(kinds))))
        return tuple(pieces)

    def runs(self, step: NodeStep, piece: CallPiece, *, in_place: bool = False) -> list[Run]:
        """Return the elements of each transfer of a step; in the caller's arrays, from the start of the piece.

        in_place: if every rank has all of the data, the rail's buffers are its share of the caller's arrays.
        """
        starts = cache(partial(self._starts, piece, in_place=in_place))
        counts = cache(partial(self.steps.layout, counts=piece.counts))
        return [
            (
                starts(source.rank, source.buffer)[source.span.start],
                starts(target.rank, target.buffer)[target.span.start],
                counts(target.rank, target.buffer).length(target.span),
            )
            for source, target in ((each.source, each.target) for each in step.transfers)
        ]

    def _starts(self, piece: CallPiece, rank: int, buffer: Buffer, *, in_place: bool) -> Sequence[int]:
        """Return the first element of each chunk in a buffer."""
        if buffer in ("source", "target"):
            counts = piece.counts if self.steps.is_whole else self.counts
            return self.steps.layout(rank, buffer, counts).offsets
        if self.steps.is_whole and in_place:
            shares = uneven(piece.counts).offsets
            return [shares[number] for number in self.steps.chunks(rank, buffer)]
        return self.steps.layout(rank, buffer, piece.counts).offsets

    def layouts(self, counts: Sequence[int]) -> tuple[Layout, ...]:
        """Return the layouts of the regions of the rail's verb: a chunk for each node, or one for all of them."""
        rail = self.steps.rail
        if rail is None:
            return ()
        return tuple(
            _by_node(self.steps.layout(self.group.rank, buffer, counts), chunks)
            for buffer, chunks in zip(rail.buffers, rail.regions, strict=True)
        )

    def compile(self, counts: Sequence[int], pieces: Sequence[CallPiece], begins: Sequence[int]) -> RailProgram:
        """Return the program of the rail for these pieces.

        counts: of the data by which to choose the algorithm. begins: the first element of each piece in its region.
        """
        steps, rail, verb = self.steps, self.steps.rail, self.steps.verb
        choice = self._choose(counts)
        each = ceil(choice.segments / len(pieces))
        pipelined = find(verb, choice.algorithm).segmented
        if rail is None:
            each = 1 if pipelined else each
            return RailProgram(program("barrier", "dissemination", 0, 1), [()] * (each * len(pieces)), each)
        nodes, segments = steps.rail_map.nodes, each if pipelined else 1
        run = program(verb, choice.algorithm, self.node, len(nodes), root=rail.root, segments=segments)
        each = 1 if pipelined or not (steps.is_whole or run.sends_single_chunks) else each
        cuts = [self._cut(run, piece, begin, each) for piece, begin in zip(pieces, begins, strict=True)]
        return RailProgram(run, [block for piece in cuts for block in piece], each)

    def _cut(self, run: Program, piece: CallPiece, begin: int, each: int) -> Iterable[Sequence[Layout | Slices]]:
        """Return the layouts of the regions for each block of a piece."""
        layouts = self.layouts(piece.counts)
        if not self.steps.is_whole:
            return zip(*(cut(layout, each) for layout in layouts), strict=True) if layouts else [()] * each
        own = blocks(layouts[0].count, run.regions[0], each)
        return [(Layout(tuple(begin + offset for offset in layout.offsets)),) for layout in own]

    def _choose(self, counts: Sequence[int]) -> Choice:
        """Choose the rail's algorithm, the same on all ranks of the rail; if all ranks have all data, on all ranks."""
        steps, rail = self.steps, self.steps.rail
        if steps.is_whole:
            count = max(counts)
        elif steps.verb == "all_to_all":  # if nodes differ in size, ranks send different amounts
            count = steps.rail_chunks * max(counts)
        else:
            count = 0 if rail is None else sum(layout.count for layout in self.layouts(counts))
        nbytes, among = count * self._item_bytes, rail_algorithms(steps.verb)
        chooser, size = self.group.runtime.chooser, len(steps.rail_map.nodes)
        return chooser.choose(steps.verb, size, nbytes, kind="network", sharing=self.number, among=among)

    def execute(
        self,
        run: RailProgram,
        arrays: Sequence[Any],
        op: ReduceFunction | None,
        *,
        part: int = 1,
        before: Hook = do_nothing,
        after: Hook = do_nothing,
    ) -> None:
        """Run the rail's verb on one array for each of its regions. part: numbers the runs of one call."""
        regions = [[Region(array, layout) for array, layout in zip(arrays, block, strict=True)] for block in run.blocks]
        rail = None if self.steps.rail is None else self.group.hierarchy.rail
        execute = self.group.programs.execute
        execute(run.program, regions, self.text, op, part=part, transport=rail, before=before, after=after)


def _by_node(layout: Layout, chunks: Sequence[int]) -> Layout:
    """Return a layout with this many chunks of another one in each chunk."""
    return Layout(tuple(layout.offsets[number] for number in accumulate(chunks, initial=0)))
