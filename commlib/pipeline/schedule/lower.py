"""Lower a schedule: add what moves data between its computations, in an order that is legal on all ranks at once.

A stage's results are sent as soon as they are there. They are received just before they are needed, but in the order in
which they were sent, which may be another one: each link has a channel for each direction, and a channel keeps the
order. Since receives are posted ahead, data travels while both ranks compute, wherever the RECV stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from commlib.pipeline.schedule.ir import COMPUTE, SENDS, Action, Kind, Link, Schedule, chain

Way = tuple[Link, Kind]
"""A link and a direction: Kind.F or Kind.B."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schedule with its messages.

    depths: how many messages each way holds that were sent and not handed back; as many as come where it says nothing.
    """

    schedule: Schedule
    links: tuple[Link, ...]
    depths: Mapping[Way, int] = field(default_factory=dict)

    def depth(self, way: Way) -> int:
        """Return how many messages a way holds."""
        return self.depths.get(way, self.schedule.microbatches)

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose results a stage takes."""
        return tuple(link.source for link in self.links if link.target == stage)

    def targets(self, stage: int) -> tuple[int, ...]:
        """Return the stages that take a stage's results."""
        return tuple(link.target for link in self.links if link.source == stage)


def lower(schedule: Schedule, links: Sequence[Link] | None = None, *, reduce: bool = False) -> Lowered:
    """Add messages along `links` (default: a chain); with `reduce` also a REDUCE where gradients are complete.

    Messages and, with `reduce`, REDUCEs that are there already are made anew. Stages of one rank send none.
    """
    links = chain(schedule.stages) if links is None else tuple(links)
    lowered = Lowered(schedule, links)
    bare = [[action for action in program if _stays(action, reduce)] for program in schedule.programs]
    order: defaultdict[Way, list[int]] = defaultdict(list)
    sending = [list(_with_sends(lowered, program, order)) for program in bare]
    programs = [_with_recvs(lowered, program, order) for program in sending]
    if reduce:
        programs = [_with_reductions(program) for program in programs]
    return Lowered(replace(schedule, programs=tuple(tuple(program) for program in programs)), links)


def _stays(action: Action, reduce: bool) -> bool:
    return action.peer < 0 and not (reduce and action.kind is Kind.REDUCE)


def gives(lowered: Lowered, action: Action) -> Iterator[tuple[Way, int]]:
    """Yield the ways on which an action's results go, and the stage at their end."""
    if action.kind is Kind.F:
        for target in lowered.targets(action.stage):
            yield (Link(action.stage, target), Kind.F), target
    elif action.kind in (Kind.B, Kind.I):
        for source in lowered.sources(action.stage):
            yield (Link(source, action.stage), Kind.B), source


def needs(lowered: Lowered, action: Action) -> Iterator[tuple[Way, int]]:
    """Yield the ways on which comes what an action needs, and the stage at their beginning."""
    if action.kind is Kind.F:
        for source in lowered.sources(action.stage):
            yield (Link(source, action.stage), Kind.F), source
    elif action.kind in (Kind.B, Kind.I):
        for target in lowered.targets(action.stage):
            yield (Link(action.stage, target), Kind.B), target


def _with_sends(lowered: Lowered, program: Iterable[Action], order: dict[Way, list[int]]) -> Iterator[Action]:
    place = lowered.schedule.placement
    for action in program:
        yield action
        for way, stage in gives(lowered, action):
            if place[stage] != place[action.stage]:
                order[way].append(action.microbatch)
                kind = Kind.SEND_F if way[1] is Kind.F else Kind.SEND_B
                yield Action(action.stage, kind, action.microbatch, stage)


def _with_recvs(lowered: Lowered, program: Iterable[Action], order: dict[Way, list[int]]) -> list[Action]:
    place = lowered.schedule.placement
    taken: defaultdict[Way, int] = defaultdict(int)
    there: set[tuple[Way, int]] = set()
    out: list[Action] = []
    for action in program:
        for way, stage in needs(lowered, action):
            if place[stage] == place[action.stage]:
                continue
            kind, sent = Kind.RECV_F if way[1] is Kind.F else Kind.RECV_B, order[way]
            while (way, action.microbatch) not in there and taken[way] < len(sent):
                microbatch = sent[taken[way]]
                taken[way] += 1
                there.add((way, microbatch))
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


def released_by(schedule: Schedule) -> dict[tuple[int, int], Action]:
    """Return, for (stage, microbatch), the action after which its activations are needed no more."""
    last: dict[tuple[int, int], Action] = {}
    for program in schedule.programs:
        for action in program:
            if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                last[action.stage, action.microbatch] = action
    return last


def handed_back(lowered: Lowered) -> dict[Action, list[tuple[int, int]]]:
    """Return after which action the messages that came for each (stage, microbatch) are needed no more.

    Results may lie in the memory of what they were made of, as those of a layer that changes nothing: so that is needed
    until they have been sent, and as long as a stage of the same rank that was given them needs its own.
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
    found: dict[Action, list[tuple[int, int]]] = {}
    for key, (_, action) in last.items():
        found.setdefault(action, []).append(key)
    return found
