"""Verify that the programs of all ranks together fulfil the contract of their verb.

All ranks are replayed with symbols instead of data. A value is a number for one chunk of one rank's input, or for the
combination of two values in a fixed operand order; equal numbers mean bitwise equal results. A bitmask holds the ranks
whose inputs are in a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlib.errors import CommlibError
from commlib.schedule.contract import Promise, inputs, promises
from commlib.schedule.ir import Program, Recv, Round, Send, Span
from commlib.schedule.replay import PostedRound, replay

NOTHING = -1


class ScheduleError(CommlibError):
    """The programs of an algorithm are wrong: a bug in the algorithm, not in the call."""


def verify(programs: Sequence[Program]) -> None:
    """Check the programs of all ranks, given in rank order. Raises ScheduleError, which names rank and round."""
    for rank, program in enumerate(programs):
        expected = (rank, len(programs), *_shared(programs[0]))
        actual = (program.rank, program.size, *_shared(program))
        if actual != expected:
            raise ScheduleError(f"program {rank} of {len(programs)} does not fit the others: {actual}, not {expected}")
    _Replay(programs).run()


def _shared(program: Program) -> tuple[object, ...]:
    return program.verb, program.algorithm, program.root, program.regions


class _Values:
    """All values, numbered. Combining the same two values in the same order gives the same number."""

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self.chunk: list[int] = []
        self._pairs: dict[tuple[int, int], int] = {}
        self._parts: dict[int, tuple[int, int]] = {}

    def leaf(self, rank: int, chunk: int) -> int:
        self.inputs.append(1 << rank)
        self.chunk.append(chunk)
        return len(self.inputs) - 1

    def combine(self, left: int, right: int) -> int:
        pair = self._pairs.get((left, right))
        if pair is None:
            pair = self._pairs[left, right] = len(self.inputs)
            self._parts[pair] = left, right
            self.inputs.append(self.inputs[left] | self.inputs[right])
            self.chunk.append(self.chunk[left])
        return pair

    def order(self, value: int) -> str:
        """Write out the order of a sum, such as ((0+1)+2)."""
        if value not in self._parts:
            return str(self.inputs[value].bit_length() - 1)
        left, right = self._parts[value]
        return f"({self.order(left)}+{self.order(right)})"


@dataclass(frozen=True, slots=True)
class _Payload:
    """The values that a step sends, read when it was posted; and the ranks whose signals it includes."""

    values: tuple[tuple[int, ...], ...]
    signals: int


class _Replay:
    def __init__(self, programs: Sequence[Program]) -> None:
        first = programs[0]
        self.programs = programs
        self.size = len(programs)
        self.name = f"{first.verb} {first.algorithm} on {self.size} ranks"
        self.edges = (0, *accumulate(first.regions))
        self.values = _Values()
        self.leaves: list[dict[int, int]] = []
        self.memory: list[list[int]] = []
        for rank in range(self.size):
            leaves = {chunk: self.values.leaf(rank, chunk) for chunk in inputs(programs[rank])}
            self.leaves.append(leaves)
            self.memory.append([leaves.get(chunk, NOTHING) for chunk in range(self.edges[-1])])
        self.signals = [1 << rank for rank in range(self.size)]
        self.payloads: dict[PostedRound, _Payload] = {}
        self.sums: dict[int, tuple[int, int]] = {}  # by chunk: (the first rank that checked it, its value)

    def run(self) -> None:
        stuck = replay([program.rounds for program in self.programs], self.posted, self.ended)
        if stuck:
            where = {step.rank: f"which waits in round {step.index}" for step in stuck}
            done = "which has finished"
            lines = [
                f"  rank {step.rank}, round {step.index}: waits to {_describe_end(end)}, {where.get(end.peer, done)}"
                for step in sorted(stuck, key=lambda step: step.rank)
                for end in step.waits
            ]
            raise ScheduleError("\n".join([f"{self.name}: deadlock", *lines]))
        for rank in range(self.size):
            self._check_result(rank)

    def posted(self, step: PostedRound) -> None:
        """Run the copies, check for hazards within the round, and read the values to send."""
        memory = self.memory[step.rank]
        for copy in step.round.copies:
            self._check_span(step, copy.source)
            self._check_span(step, copy.target)
            if len(copy.source) != len(copy.target):
                raise self._error(step, f"copies {len(copy.source)} chunks over {len(copy.target)}")
            if copy.source.overlaps(copy.target):
                raise self._error(step, f"copies the chunks {copy.source} over themselves, {copy.target}")
            source = self._read(step, copy.source, "copies")
            memory[copy.target.start : copy.target.stop] = source
        self._check_round(step, step.round)
        contents = tuple(self._read(step, send.span, "sends") for send in step.round.sends)
        if step.round.sends:
            self.payloads[step] = _Payload(contents, self.signals[step.rank])

    def ended(self, step: PostedRound) -> None:
        """Store the received values in memory, in the order of the receives."""
        memory = self.memory[step.rank]
        for recv, origin in zip(step.round.recvs, step.inbox, strict=True):
            assert origin is not None
            sender, index = origin
            payload = self.payloads[sender]
            arrived = payload.values[index]
            self.signals[step.rank] |= payload.signals
            if len(arrived) != len(recv.span):
                what = f"receives {len(recv.span)} chunks ({recv.span}) from rank {recv.peer}, whose round "
                what += f"{sender.index} sends {len(arrived)} ({sender.round.sends[index].span})"
                raise self._error(step, what)
            if recv.reduce:
                for chunk, value in enumerate(arrived, recv.span.start):
                    memory[chunk] = self._combine(step, recv.peer, chunk, value)
            else:
                memory[recv.span.start : recv.span.stop] = arrived

    def _combine(self, step: PostedRound, peer: int, chunk: int, arrived: int) -> int:
        own = self.memory[step.rank][chunk]
        values = self.values
        if own == NOTHING:
            raise self._error(step, f"adds the data of rank {peer} to chunk {chunk}, which has no data yet")
        if values.chunk[own] != values.chunk[arrived]:
            what = f"adds chunk {values.chunk[arrived]} from rank {peer} to chunk {values.chunk[own]}"
            raise self._error(step, what)
        twice = values.inputs[own] & values.inputs[arrived]
        if twice:
            what = (
                f"adds the data of rank {peer} to chunk {chunk}, which counts the input of {_format_ranks(twice)} twice"
            )
            raise self._error(step, what)
        return values.combine(arrived, own) if peer < step.rank else values.combine(own, arrived)

    def _check_round(self, step: PostedRound, round: Round) -> None:
        ends: list[Send | Recv] = [*round.sends, *round.recvs]
        for end in ends:
            self._check_span(step, end.span)
            if end.peer == step.rank or not 0 <= end.peer < self.size:
                raise self._error(step, f"cannot {_describe_end(end)}")
        for place, recv in enumerate(round.recvs):
            for other in round.recvs[:place]:
                if recv.span.overlaps(other.span) and not (recv.reduce and other.reduce):
                    raise self._error(
                        step, f"would {_describe_end(other)} and {_describe_end(recv)} into the same chunks"
                    )
            for send in round.sends:
                if not recv.reduce and recv.span.overlaps(send.span):
                    raise self._error(step, f"would {_describe_end(send)} and {_describe_end(recv)} at once")

    def _check_span(self, step: PostedRound, span: Span) -> None:
        if span.start == span.stop == 0:
            return
        inside = any(start <= span.start and span.stop <= stop for start, stop in pairwise(self.edges))
        if not inside or span.start > span.stop:
            raise self._error(step, f"the chunks {span.start}..{span.stop} are not within one region of {self.edges}")

    def _read(self, step: PostedRound, span: Span, what: str) -> tuple[int, ...]:
        values = tuple(self.memory[step.rank][span.start : span.stop])
        if NOTHING in values:
            raise self._error(step, f"{what} chunk {span.start + values.index(NOTHING)}, which has no data yet")
        return values

    def _check_result(self, rank: int) -> None:
        everyone = (1 << self.size) - 1
        if self.programs[rank].verb == "barrier" and self.signals[rank] != everyone:
            raise self._final_error(rank, f"it has no signal from {_format_ranks(everyone ^ self.signals[rank])}")
        for promise in promises(self.programs[rank]):
            value = self.memory[rank][promise.chunk]
            if promise.owner is None:
                self._check_sum(rank, promise, value)
            elif value != self.leaves[promise.owner][promise.source]:
                what = f"chunk {promise.chunk} must hold chunk {promise.source} of rank {promise.owner}"
                raise self._final_error(rank, f"{what}, but holds {self._describe(value)}")

    def _check_sum(self, rank: int, promise: Promise, value: int) -> None:
        complete = value != NOTHING and self.values.inputs[value] == (1 << (promise.first or self.size)) - 1
        if not complete or self.values.chunk[value] != promise.source:
            ranks = f"the first {promise.first}" if promise.first else "all"
            what = f"chunk {promise.chunk} must hold the sum of chunk {promise.source} over {ranks} ranks"
            raise self._final_error(rank, f"{what}, but holds {self._describe(value)}")
        if promise.first:
            return
        first = self.sums.setdefault(promise.chunk, (rank, value))
        if first[1] != value:
            what = f"chunk {promise.chunk} was summed in another order than on rank {first[0]}"
            raise self._final_error(rank, f"{what}: {self.values.order(value)}, not {self.values.order(first[1])}")

    def _describe(self, value: int) -> str:
        if value == NOTHING:
            return "nothing"
        return f"chunk {self.values.chunk[value]} of {_format_ranks(self.values.inputs[value])}"

    def _error(self, step: PostedRound, what: str) -> ScheduleError:
        return ScheduleError(f"{self.name}: rank {step.rank}, round {step.index}: {what}")

    def _final_error(self, rank: int, what: str) -> ScheduleError:
        return ScheduleError(f"{self.name}: rank {rank}, after round {len(self.programs[rank].rounds) - 1}: {what}")


def _describe_end(end: Send | Recv) -> str:
    if isinstance(end, Send):
        return f"send {end.span} to rank {end.peer}"
    return f"{'add' if end.reduce else 'receive'} {end.span} from rank {end.peer}"


def _format_ranks(mask: int) -> str:
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
