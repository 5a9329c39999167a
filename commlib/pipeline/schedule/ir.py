"""The intermediate representation of a pipeline schedule: actions of stages on microbatches.

Each rank runs its actions in order. "2F0" is the forward of microbatch 0 in stage 2, "1B3" the backward of microbatch 3
in stage 1. A backward may be split into I, the gradients of a stage's inputs, for which the previous stage waits, and
W, gradients of its weights, for which no stage waits. Plans contain no messages: `lower` adds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from commlib.errors import CommlibError, UsageError


class PipelineScheduleError(CommlibError):
    """A schedule breaks a rule or deadlocks: an error in the schedule, found before it runs."""


class Kind(StrEnum):
    """The kind of an action. F, B, I and W compute; the next four move data; REDUCE and STEP are for weights."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    """Start to reduce the stage's gradients over its data-parallel replicas."""
    STEP = "STEP"
    """Update the stage's weights from the gradients since the last update."""

    __hash__ = str.__hash__  # Enum's hash runs in Python, and long schedules hash millions of kinds


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
SENDS = frozenset((Kind.SEND_F, Kind.SEND_B))
RECVS = frozenset((Kind.RECV_F, Kind.RECV_B))
WEIGHTS = frozenset((Kind.REDUCE, Kind.STEP))

_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|STEP|[FBIW])(\d*)(?::(\d+))?")

# The kind of a message's other end, and the offset of its stage in a chain.
_ENDS = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}


class Action(NamedTuple):
    """One action: "2F0", "1B3", "0SEND_F2", "1REDUCE".

    microbatch: -1 for REDUCE and STEP. peer: the stage at the other end of a message, else -1. A tuple, for fast
    comparison and hashing.
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"
        return f"{text}:{self.peer}" if self.peer >= 0 and self.peer != self.stage + _ENDS[self.kind][1] else text

    @property
    def other_end(self) -> Action:
        """The action at the other end of a message."""
        return Action(self.peer, _ENDS[self.kind][0], self.microbatch, self.stage)

    @property
    def link(self) -> Link:
        """The link of a message."""
        forward = self.kind in (Kind.SEND_F, Kind.RECV_B)
        return Link(self.stage, self.peer) if forward else Link(self.peer, self.stage)


def parse(text: str) -> Action:
    """Return the action for a text such as "2F0". A message goes to the neighbour unless the text ends in ":STAGE".

    Raises UsageError.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text.strip()!r} is not an action; expected one such as 2F0, 1B3, 0I1, 0W1, 0SEND_F2, 1REDUCE"
        )
    stage, kind, microbatch, peer = int(match[1]), Kind(match[2]), match[3], match[4]
    if (microbatch == "") != (kind in WEIGHTS):
        what = "takes no microbatch" if microbatch else "needs the number of a microbatch"
        raise UsageError(f"{text.strip()!r} is not an action: {kind} {what}")
    if kind not in _ENDS:
        if peer is not None:
            raise UsageError(f"{text.strip()!r} is not an action: only messages name another stage")
        return Action(stage, kind, int(microbatch) if microbatch else -1)
    other = stage + _ENDS[kind][1] if peer is None else int(peer)
    if other < 0 or other == stage:
        raise UsageError(f"{text.strip()!r} is not an action: stage {other} cannot be at the other end")
    return Action(stage, kind, int(microbatch), other)


class Link(NamedTuple):
    """Two stages: the second takes the results of the first; gradients go back."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


class Weights(StrEnum):
    """The version of the weights that a forward uses in schedules with STEPs; its backward uses the same one."""

    FLUSH = "flush"
    """No STEPs within a batch."""
    NEWEST = "newest"
    """The newest weights of the stage at that time (PipeDream's weight stashing)."""
    PREVIOUS = "previous"
    """The weights before the last update: the same version in all stages (PipeDream-2BW)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of all ranks for one batch.

    placement: the rank of each stage. programs: the actions of each rank, in order. every: microbatches from one STEP
    to the next; 0 without STEPs.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    programs: tuple[tuple[Action, ...], ...]
    weights: Weights = Weights.FLUSH
    every: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    @property
    def title(self) -> str:
        """The name of the schedule and its sizes."""
        sizes = ((self.ranks, "rank"), (self.stages, "stage"), (self.microbatches, "microbatch"))
        counts = (
            f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}" for count, noun in sizes
        )
        return f"{self.name}, {', '.join(counts)}"

    @property
    def has_backward(self) -> bool:
        """Whether the schedule computes any gradients."""
        return any(action.kind in (Kind.B, Kind.I, Kind.W) for program in self.programs for action in program)


def chain(stages: int) -> tuple[Link, ...]:
    """Return the links of a chain of stages: each takes the results of the one before."""
    return tuple(Link(stage, stage + 1) for stage in range(stages - 1))
