"""Rounds: predict an algorithm that runs all ranks in lock step, from the rounds of one or two of them.

Simulating a ring costs P^2 messages, but every rank does the same in every round, so the rounds of one rank suffice: a
round takes as long as its port is busy, plus the time to combine the received chunks. Where ranks are folded onto a
power of two (see `schedule.folding`), rank 1 works for two and is the slowest; in a tree it is the root, rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from commlib.schedule import Round, find
from commlib.schedule.spans import ceil_log2


class Step(NamedTuple):
    """A round of one rank, as its ports see it. `times` equal rounds follow each other."""

    times: int
    messages: int  # through one port, one after another
    chunks: int  # in these messages, in total
    combined: int = 0  # received chunks that are combined
    copied: int = 0  # chunks copied within this rank
    shift: int = 0  # distance to the receiving rank; 0: several receivers
    mutual: bool = False  # the senders are also the receivers


class Cost(NamedTuple):
    """The total of one rank's steps: `messages` alpha + `chunks` c beta + (`combined` + `copied`) c gamma."""

    messages: int
    chunks: int
    combined: int
    copied: int


@lru_cache(maxsize=4096)
def costs(verb: str, name: str, size: int, segments: int) -> tuple[Cost, ...]:
    """Return the costs of the ranks that may be the slowest."""
    return tuple(
        Cost(
            sum(step.times * step.messages for step in steps),
            sum(step.times * step.chunks for step in steps),
            sum(step.times * step.combined for step in steps),
            sum(step.times * step.copied for step in steps),
        )
        for steps in rank_steps(verb, name, size, segments)
    )


@lru_cache(maxsize=64)
def rank_steps(verb: str, name: str, size: int, segments: int) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of the ranks that may be the slowest."""
    formula = FORMULAS.get((verb, name))
    if formula is not None:
        return (tuple(formula(size)),)
    algorithm = find(verb, name)
    ranks = range(min(size, 2))
    return tuple(
        tuple(_step(rank, size, step) for step in algorithm.rounds(rank, size, segments=segments)) for rank in ranks
    )


def _step(rank: int, size: int, step: Round) -> Step:
    targets, sources = {send.peer for send in step.sends}, {recv.peer for recv in step.recvs}
    sent, received = (sum(len(end.span) for end in ends) for ends in (step.sends, step.recvs))
    only = targets or sources
    one_way = not (targets and sources)
    return Step(
        times=1,
        messages=max(len(targets), len(sources)),  # several pieces for one rank form one message
        chunks=max(sent, received),
        combined=sum(len(recv.span) for recv in step.recvs if recv.reduce),
        copied=sum(len(copy.source) for copy in step.copies),
        shift=(next(iter(only)) - rank) % size if len(only) == 1 else 0,
        mutual=targets == sources or (one_way and len(only) == 1),
    )


# Formulas for algorithms where even one rank is costly: P - 1 rounds, P - 1 messages in one, or P single-chunk copies.

Formula = Callable[[int], Iterator[Step]]


def _ring(*combined: int) -> Formula:
    def steps(size: int) -> Iterator[Step]:
        return (Step(size - 1, 1, 1, chunks, shift=1) for chunks in combined if size > 1)

    return steps


def _pairwise(size: int) -> Iterator[Step]:
    yield Step(1, 0, 0, copied=1)
    yield from (Step(1, 1, 1, shift=distance) for distance in range(1, size))


def _bruck_all_to_all(size: int) -> Iterator[Step]:
    yield Step(1, 0, 0, copied=size)
    for bit in range(ceil_log2(size)):
        period, width = 2 << bit, 1 << bit
        on_the_way = size // period * width + max(0, size % period - width)  # numbers below `size` with this bit set
        yield Step(1, 1, on_the_way, copied=2 * on_the_way, shift=width)  # packed before, unpacked after


def _rooted(size: int) -> Iterator[Step]:
    yield Step(1, size - 1, size - 1)


def _all_to_others(*combined: bool) -> Formula:
    """All ranks to all others at once: about every third message finds its receiver busy, and a port idles."""

    def steps(size: int) -> Iterator[Step]:
        messages = size - 1 + (size - 1) // 3
        for combines in combined if size > 1 else ():
            yield Step(1, messages, messages, combined=(size - 1) * combines, mutual=True)

    return steps


FORMULAS: dict[tuple[str, str], Formula] = {
    ("all_reduce", "ring"): _ring(1, 0),
    ("reduce_scatter", "ring"): _ring(1),
    ("all_gather", "ring"): _ring(0),
    ("all_to_all", "pairwise"): _pairwise,
    ("all_to_all", "bruck"): _bruck_all_to_all,
    ("gather", "direct"): _rooted,
    ("scatter", "direct"): _rooted,
    ("all_reduce", "direct"): _all_to_others(True, False),
    ("reduce_scatter", "direct"): _all_to_others(True),
    ("all_gather", "direct"): _all_to_others(False),
}

APPROXIMATE = {(verb, "direct"): 0.15 for verb in ("all_reduce", "reduce_scatter", "all_gather")}
"""The largest relative errors against the simulation, with more than a few messages; the other formulas are exact."""
