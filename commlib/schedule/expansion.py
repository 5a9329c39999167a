"""Expansion: a hierarchical program as rounds of messages, to verify, simulate and render it like any other.

A step of the node becomes one round: transfers between ranks are messages, and those of a rank to itself are copies.
The verb along the rail becomes the rounds of an algorithm. The regions are those of the verb, then the rail's buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise

from commlib.errors import UsageError
from commlib.schedule.hierarchy import HierarchicalProgram, NodeStep, Part, Run, join
from commlib.schedule.ir import Copy, Program, Recv, Round, Send, Span
from commlib.schedule.registry import algorithms, find, program


def rail_algorithms(verb: str) -> tuple[str, ...]:
    """Return the algorithms that rails can run: the chunks of different nodes may differ in size."""
    return tuple(name for name in algorithms(verb) if not find(verb, name).even_only)


def expand(steps: HierarchicalProgram, algorithm: str) -> Program:
    """Return the rounds of a hierarchical program whose rails run `algorithm`. All chunks have the same size.

    Raises UsageError for an algorithm that rails cannot run.
    """
    if algorithm not in rail_algorithms(steps.verb):
        raise UsageError(
            f"hierarchical {steps.verb}: {algorithm!r} does not run between nodes; "
            f"expected one of {', '.join(rail_algorithms(steps.verb))}"
        )
    return _Expansion(steps, algorithm).program()


class _Expansion:
    """split: the program's chunks for each chunk of the hierarchy. data, buffers: the regions."""

    def __init__(self, steps: HierarchicalProgram, algorithm: str) -> None:
        self.steps, self.rail_map, nodes = steps, steps.rail_map, steps.rail_map.nodes
        self.rail = program(steps.verb, algorithm, self.rail_map.node(steps.rank), len(nodes), root=self._root())
        self.split = self.rail.regions[0] if steps.is_whole else 1
        chunks = self.rail_map.rails * self.split if steps.is_whole else self.rail_map.size
        self.data = {"barrier": (), "all_to_all": (chunks, chunks)}.get(steps.verb, (chunks,))
        # The regions are the same on all ranks, and the first rank of some node has the most chunks.
        firsts = [ranks[0] for ranks in nodes]
        outgoing = max(len(steps.chunks(rank, "outgoing")) for rank in firsts) * self.split
        incoming = max(len(steps.chunks(rank, "incoming")) for rank in firsts) * self.split
        both = {"barrier": (), "all_to_all": (outgoing, incoming)}
        self.buffers = both.get(steps.verb, (max(outgoing, incoming),))

    def _root(self) -> int:
        return self.rail_map.node(self.steps.root) if self.steps.verb == "broadcast" else 0

    def program(self) -> Program:
        steps, rail = self.steps, self.rail
        rounds = [self._node_round(step) for step in steps.before]
        if steps.rail is not None:
            rounds += self._rail_rounds()
        rounds += [self._node_round(step) for step in steps.after]
        name, size = f"hierarchical ({rail.algorithm} between nodes)", self.rail_map.size
        used = tuple(round for round in rounds if round != Round())
        return Program(steps.verb, name, steps.rank, size, steps.root, self.data + self.buffers, used)

    def _start(self, part: Part) -> int:
        """Return the number of a part's first chunk."""
        verb, data = self.steps.verb, sum(self.data)
        match verb, part.buffer:
            case ("all_gather", "source") | ("reduce_scatter", "target"):
                first = part.rank
            case "all_to_all", "target":
                first = self.data[0]
            case _, "source" | "target":
                first = 0
            case "all_to_all", "incoming":
                first = data + self.buffers[0]
            case ("all_gather", "outgoing") | ("reduce_scatter", "incoming"):  # one node's part of the rail's data
                node = self.rail_map.node(part.rank)
                place = self.rail_map.nodes[node].index(part.rank)
                first = data + sum(len(self.rail_map.members(number, place)) for number in range(node))
            case _:
                first = data
        return first + part.span.start * self.split

    def _node_round(self, step: NodeStep) -> Round:
        rank, runs = self.steps.rank, defaultdict[tuple[int, int], list[Run]](list)
        for each in step.transfers:
            pair, length = (each.source.rank, each.target.rank), len(each.source.span) * self.split
            if rank in pair:
                runs[pair].append((self._start(each.source), self._start(each.target), length))
        sends, recvs, copies = list[Send](), list[Recv](), list[Copy]()
        for (giver, taker), parts in runs.items():
            for source, target, length in join(parts):
                sent, received = (Span(first, first + length) if length else Span(0, 0) for first in (source, target))
                if giver != taker and giver == rank:
                    sends.append(Send(taker, sent))
                elif giver != taker:
                    recvs.append(Recv(giver, received, step.reduce))
                elif source != target:
                    copies.append(Copy(sent, received))
        return Round(tuple(sends), tuple(recvs), tuple(copies))

    def _rail_rounds(self) -> Iterator[Round]:
        """Yield the rounds of the rail, with the numbers of this program's ranks and chunks."""
        node = self.rail_map.nodes[self.rail.rank]
        peers = [ranks[node.index(self.steps.rank)] for ranks in self.rail_map.nodes]
        firsts = accumulate(self.buffers, initial=sum(self.data))
        assert self.steps.rail is not None
        regions = ((1,) * self.split,) if self.steps.is_whole else self.steps.rail.regions
        spans = [
            Span(first + start, first + stop)
            for first, counts in zip(firsts, regions, strict=False)
            for start, stop in pairwise(accumulate(counts, initial=0))
        ]

        def span(chunks: Span) -> Span:
            return Span(spans[chunks.start].start, spans[chunks.stop - 1].stop) if len(chunks) else chunks

        for step in self.rail.rounds:
            copies = tuple(Copy(span(copy.source), span(copy.target)) for copy in step.copies)
            yield Round(
                tuple(Send(peers[send.peer], span(send.span)) for send in step.sends),
                tuple(Recv(peers[recv.peer], span(recv.span), recv.reduce) for recv in step.recvs),
                tuple(copy for copy in copies if len(copy.source)),
            )
