"""Lower a schedule: add messages between its computations, in an order that is legal on all ranks at once.

A stage sends its results as soon as they exist. A stage receives values just before it needs them, but in the order in
which they were sent, which may differ: each link has a channel for each direction, and a channel keeps the order.
Receives are posted ahead, so data moves while both ranks compute, wherever the RECV is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from commlib.pipeline.schedule.ir import COMPUTE, SENDS, Action, Kind, Link, Schedule, chain

LinkDirection = tuple[Link, Kind]
"""A link and a direction: Kind.F or Kind.B."""


@dataclass(frozen=True, slots=True)
class LoweredSchedule:
    """A schedule with its messages.

    depths: the number of messages that each link direction holds, sent and not yet released; without an entry, all of
    them.
    """

    schedule: Schedule
    links: tuple[Link, ...]
    depths: Mapping[LinkDirection, int] = field(default_factory=dict)

    def depth(self, way: LinkDirection) -> int:
        """Return the number of messages that a link direction holds."""
        return self.depths.get(way, self.schedule.microbatches)

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose results a stage takes."""
        return tuple(link.source for link in self.links if link.target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take a stage's results."""
        return tuple(link.target for link in self.links if link.source == stage)


def lower(schedule: Schedule, links: Sequence[Link] | None = None, *, reduce: bool = False) -> LoweredSchedule:
    """Add messages along `links` (default: a chain); with `reduce` also a REDUCE where gradients are complete.

    Existing messages and, with `reduce`, existing REDUCEs are replaced. Stages of one rank exchange no messages.
    """
    links = chain(schedule.stages) if links is None else tuple(links)
    lowered = LoweredSchedule(schedule, links)
    bare = [[action for action in program if _is_computed(action, reduce)] for program in schedule.programs]
    order: defaultdict[LinkDirection, list[int]] = defaultdict(list)
    sending = [list(_with_sends(lowered, program, order)) for program in bare]
    programs = [_with_recvs(lowered, program, order) for program in sending]
    if reduce:
        programs = [_with_reductions(program) for program in programs]
    return LoweredSchedule(replace(schedule, programs=tuple(tuple(program) for program in programs)), links)


def _is_computed(action: Action, reduce: bool) -> bool:
    return action.peer < 0 and not (reduce and action.kind is Kind.REDUCE)


def gives(lowered: LoweredSchedule, action: Action) -> Iterator[tuple[LinkDirection, int]]:
    """Yield the link directions of an action's results, each with the receiving stage."""
    if action.kind is Kind.F:
        for target in lowered.targets(action.stage):
            yield (Link(action.stage, target), Kind.F), target
    elif action.kind in (Kind.B, Kind.I):
        for source in lowered.sources(action.stage):
            yield (Link(source, action.stage), Kind.B), source


def needs(lowered: LoweredSchedule, action: Action) -> Iterator[tuple[LinkDirection, int]]:
    """Yield the link directions of an action's inputs, each with the sending stage."""
    if action.kind is Kind.F:
        for source in lowered.sources(action.stage):
            yield (Link(source, action.stage), Kind.F), source
    elif action.kind in (Kind.B, Kind.I):
        for target in lowered.targets(action.stage):
            yield (Link(action.stage, target), Kind.B), target


def _with_sends(
    lowered: LoweredSchedule, program: Iterable[Action], order: dict[LinkDirection, list[int]]
) -> Iterator[Action]:
    place = lowered.schedule.placement
    for action in program:
        yield action
        for way, stage in gives(lowered, action):
            if place[stage] != place[action.stage]:
                order[way].append(action.microbatch)
                kind = Kind.SEND_F if way[1] is Kind.F else Kind.SEND_B
                yield Action(action.stage, kind, action.microbatch, stage)


def _with_recvs(
    lowered: LoweredSchedule, program: Iterable[Action], order: dict[LinkDirection, list[int]]
) -> list[Action]:
    place = lowered.schedule.placement
    received: defaultdict[LinkDirection, int] = defaultdict(int)
    arrived: set[tuple[LinkDirection, int]] = set()
    out: list[Action] = []
    for action in program:
        for way, stage in needs(lowered, action):
            if place[stage] == place[action.stage]:
                continue
            kind, sends = Kind.RECV_F if way[1] is Kind.F else Kind.RECV_B, order[way]
            while (way, action.microbatch) not in arrived and received[way] < len(sends):
                microbatch = sends[received[way]]
                received[way] += 1
                arrived.add((way, microbatch))
                out.append(Action(action.stage, kind, microbatch, stage))
        out.append(action)
    return out


def _with_reductions(program: Sequence[Action]) -> list[Action]:
    """Add a REDUCE after the last gradient of each stage before each of its STEPs, and at its end."""
    last: dict[int, int] = {}
    complete: dict[int, int] = {}
    for place, action in enumerate(program):
        if action.kind in (Kind.B, Kind.W):
            last[action.stage] = place
        elif action.kind is Kind.STEP and action.stage in last:
            complete[last.pop(action.stage)] = action.stage
    complete |= {place: stage for stage, place in last.items()}
    out: list[Action] = []
    for place, action in enumerate(program):
        out.append(action)
        if place in complete:
            out.append(Action(complete[place], Kind.REDUCE))
    return out


def last_uses(schedule: Schedule) -> dict[tuple[int, int], Action]:
    """Return, for (stage, microbatch), the last action that needs its activations."""
    last: dict[tuple[int, int], Action] = {}
    for program in schedule.programs:
        for action in program:
            if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                last[action.stage, action.microbatch] = action
    return last


def message_releases(lowered: LoweredSchedule) -> dict[Action, list[tuple[int, int]]]:
    """Return, by action, the (stage, microbatch) pairs whose received messages are no longer needed after it.

    Results may share the memory of their inputs, for example in an identity layer. So the memory of inputs is
    needed until the results have been sent, and until a stage of the same rank that got the results no longer needs
    them.
    """
    schedule = lowered.schedule
    last: dict[tuple[int, int], tuple[int, Action]] = {}
    for program in schedule.programs:
        for place, action in enumerate(program):
            if action.kind in COMPUTE or action.kind in SENDS:
                last[action.stage, action.microbatch] = place, action
    backwards = schedule.has_backward  # gradients go to earlier stages; without them activations to later ones
    for stage in range(schedule.stages) if backwards else reversed(range(schedule.stages)):
        others = lowered.sources(stage) if backwards else lowered.targets(stage)
        for other in others:
            if schedule.placement[other] == schedule.placement[stage]:
                for microbatch in range(schedule.microbatches):
                    key = stage, microbatch
                    last[key] = max(last[key], last[other, microbatch], key=lambda use: use[0])
    releases: dict[Action, list[tuple[int, int]]] = {}
    for key, (_, action) in last.items():
        releases.setdefault(action, []).append(key)
    return releases
