"""The intermediate representation of a collective algorithm.

An algorithm is a generator of `Round`s for ONE rank. It refers to chunks by number. `layout` maps them to elements and
the executor maps these to bytes, so one schedule serves every size, dtype and uneven count.

The semantics of a round:

1. its copies run, in order;
2. all its receives and sends are posted at once, and the round ends when all are complete. Nothing is assumed to be
   buffered: a send completes only when its receiver has posted the matching receive;
3. a receive with `reduce=True` arrives in scratch memory. After the round's sends have left, it is combined with the
   chunks of its span, so a rank may send and reduce into the same chunks in one round (recursive doubling).
   Several reducing receives of one round into the same chunks are combined at once. A plain receive must not touch
   chunks that the same round sends.

Messages between two ranks match in the order in which they were posted. The operand order of a combination is fixed (by
rank, the lowest first), so the result is the same on every rank and in every run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The chunks `start`, ..., `stop - 1`. Empty (`start == stop`) for a message that only synchronizes."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        if len(self) == 1:
            return str(self.start)
        return f"{self.start}-{self.stop - 1}" if len(self) else "·"


EMPTY = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the chunks of `span` to rank `peer`."""

    peer: int
    span: Span


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive from rank `peer` into `span`: overwrite it, or combine with it if `reduce`."""

    peer: int
    span: Span
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy chunks within this rank. Both spans have the same length in elements."""

    source: Span
    target: Span


@dataclass(frozen=True, slots=True)
class Round:
    """One step of one rank; the module's docstring defines its semantics."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """All steps of one rank in one collective.

    `regions` gives the number of chunks of each memory region, in order: chunk numbers run on from one region to the
    next, and a span lies within one region. Most verbs have one region, the data itself. all_to_all has (input, output)
    and, for Bruck, scratch regions that the executor allocates.
    """

    verb: str
    algorithm: str
    rank: int
    size: int
    root: int
    regions: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def sends_single_chunks(self) -> bool:
        """Whether no message or copy has more than one chunk, so that every chunk may be cut into slices."""
        for step in self.rounds:
            spans = [send.span for send in step.sends] + [recv.span for recv in step.recvs]
            for copy in step.copies:
                spans += [copy.source, copy.target]
            if any(len(span) > 1 for span in spans):
                return False
        return True
