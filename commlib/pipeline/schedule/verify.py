"""Prove that a schedule does what it must: every microbatch forward and back through all stages, and no deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.pipeline.schedule.depths import deepened
from commlib.pipeline.schedule.ir import (
    COMPUTE,
    RECVS,
    SENDS,
    WEIGHTS,
    Action,
    Kind,
    Link,
    Schedule,
    ScheduleError,
    Weights,
)
from commlib.pipeline.schedule.lower import Lowered, Way, lower, needs
from commlib.pipeline.schedule.render import pointed
from commlib.pipeline.schedule.replay import Replay, way_of
from commlib.pipeline.schedule.versions import versions


def verify(schedule: Schedule, links: Sequence[Link] | None = None, *, reduce: bool = False) -> Lowered:
    """Check a schedule over stages that are linked so (default: a chain), and return it with its messages.

    The rules: a stage's actions stand on the rank it is placed on; each microbatch has one F in each stage, and then
    one B, or one I and then one W (or none of them in any: a forward only); what an action needs was made before;
    REDUCE and STEP come after gradients, and no gradient after its stage's last one. Then all ranks are replayed with
    ways of the depths that they will have. Raises ScheduleError with the programs drawn and an arrow at the fault.
    """
    _check_links(schedule, links)
    _Rules(schedule).check()
    lowered = lower(schedule, links, reduce=reduce)
    check_messages(lowered)  # without limits of depth: what waits for ever now, always does
    lowered = deepened(lowered)
    check_messages(lowered)
    return lowered


def check_messages(lowered: Lowered) -> None:
    """Check what `lower` has made, or somebody else: each message has two ends, and nobody waits for ever."""
    _Order(lowered).check()
    stuck = Replay(lowered).run(lambda rank, position, action: None)
    if stuck:
        schedule = lowered.schedule
        lines = [f"  rank {one.rank}: {one.action} {one.why}" for one in stuck]
        drawn = pointed(schedule, {one.rank: one.position for one in stuck})
        raise ScheduleError("\n".join([f"{schedule.title}: deadlock", *lines, drawn]))


def _check_links(schedule: Schedule, links: Sequence[Link] | None) -> None:
    for link in links or ():
        if not 0 <= link.source < link.target < schedule.stages:
            raise ScheduleError(
                f"{schedule.title}: link {link}: expected one from a stage to a later one of the {schedule.stages}"
            )


class _Rules:
    """What each rank's program must be, whatever the others do."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._done: dict[tuple[int, Kind, int], int] = {}
        self._last_gradient: dict[int, int] = {}

    def check(self) -> None:
        schedule = self._schedule
        for rank in schedule.placement:
            if not 0 <= rank < schedule.ranks:
                raise ScheduleError(f"{schedule.title}: a stage is placed on rank {rank} of {schedule.ranks}")
        for rank, program in enumerate(schedule.programs):
            for place, action in enumerate(program):
                if action.peer < 0:
                    self._check(rank, place, action)
        self._check_complete()
        if schedule.weights is Weights.FLUSH:
            self._check_last()
        else:
            self._check_versions()

    def _check(self, rank: int, place: int, action: Action) -> None:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        schedule = self._schedule
        if stage >= schedule.stages or schedule.placement[stage] != rank:
            where = f"is on rank {schedule.placement[stage]}" if stage < schedule.stages else "does not exist"
            raise self._error(rank, place, f"stage {stage} {where}")
        if kind in COMPUTE:
            if microbatch >= schedule.microbatches:
                raise self._error(rank, place, f"there are {schedule.microbatches} microbatches")
            if (stage, kind, microbatch) in self._done:
                raise self._error(rank, place, "is there twice")
            self._check_before(rank, place, action)
        self._done[stage, kind, microbatch] = place

    def _check_before(self, rank: int, place: int, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        done = self._done

        def need(kind: Kind) -> None:
            if (stage, kind, microbatch) not in done:
                raise self._error(rank, place, f"{Action(stage, kind, microbatch)} must come before it")

        def refuse(*kinds: Kind) -> None:
            for kind in kinds:
                if (stage, kind, microbatch) in done:
                    raise self._error(rank, place, f"{Action(stage, kind, microbatch)} has done that already")

        match action.kind:
            case Kind.B:
                need(Kind.F)
                refuse(Kind.I, Kind.W)
            case Kind.I:
                need(Kind.F)
                refuse(Kind.B)
            case Kind.W:
                refuse(Kind.B)
                need(Kind.I)
        if action.kind in (Kind.B, Kind.W):
            self._last_gradient[stage] = place

    def _check_complete(self) -> None:
        schedule, done = self._schedule, self._done
        for stage, rank in enumerate(schedule.placement):
            for microbatch in range(schedule.microbatches):
                end = len(schedule.programs[rank])
                if (stage, Kind.F, microbatch) not in done:
                    raise self._error(rank, end, f"{Action(stage, Kind.F, microbatch)} is missing")
                if not schedule.has_backward or (stage, Kind.B, microbatch) in done:
                    continue
                if (stage, Kind.I, microbatch) not in done:
                    raise self._error(rank, end, f"{Action(stage, Kind.B, microbatch)} is missing")
                if (stage, Kind.W, microbatch) not in done:
                    raise self._error(rank, end, f"{Action(stage, Kind.W, microbatch)} is missing")

    def _check_last(self) -> None:
        """Check that nothing is added to gradients that are being reduced, or to weights that have been updated."""
        for (stage, kind, _), place in self._done.items():
            if kind in WEIGHTS and place < (last := self._last_gradient.get(stage, -1)):
                rank = self._schedule.placement[stage]
                program = self._schedule.programs[rank]
                raise self._error(
                    rank, last, f"comes after {program[place]}, which needs all gradients of stage {stage}"
                )

    def _check_versions(self) -> None:
        """Check that every forward finds the weights that it has to use."""
        schedule = self._schedule
        for (stage, microbatch), (wanted, newest) in versions(schedule).items():
            if wanted > newest:
                rank, place = schedule.placement[stage], self._done[stage, Kind.F, microbatch]
                what = f"uses the weights after {wanted} updates, but there have been {newest}"
                raise self._error(rank, place, what)

    def _error(self, rank: int, place: int, what: str) -> ScheduleError:
        schedule = self._schedule
        program = schedule.programs[rank]
        at = f"{program[place]}, action {place} of rank {rank}: " if place < len(program) else f"rank {rank}: "
        return ScheduleError(f"{schedule.title}: {at}{what}\n{pointed(schedule, {rank: place})}")


class _Order:
    """What must have been made, sent and received before each action; and each message in the order of its way."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered, self._schedule = lowered, lowered.schedule
        self._there: set[Action] = set()

    def check(self) -> None:
        place = self._schedule.placement
        ways: dict[Way, list[list[int]]] = {}
        for rank, program in enumerate(self._schedule.programs):
            for position, action in enumerate(program):
                if action.kind in SENDS | RECVS:
                    ends = ways.setdefault(way_of(action), [[], []])
                    ends[action.kind in RECVS].append(action.microbatch)
                for needed in self._needed(action):
                    if needed not in self._there:
                        raise self._error(rank, position, f"{needed} must come before it on rank {place[needed.stage]}")
                self._there.add(action)
        for (link, kind), (sent, received) in ways.items():
            if sent != received:
                raise ScheduleError(
                    f"{self._schedule.title}: on link {link}, {kind}: microbatches are sent in the order {sent}, but "
                    f"received in the order {received}"
                )

    def _needed(self, action: Action) -> list[Action]:
        """Return what must have been done on this rank before."""
        place, stage, microbatch = self._schedule.placement, action.stage, action.microbatch
        if action.kind is Kind.SEND_F:
            return [Action(stage, Kind.F, microbatch)]
        if action.kind is Kind.SEND_B:
            return [self._backward(stage, microbatch)]
        found = []
        for (_, kind), other in needs(self._lowered, action):
            if place[other] != place[stage]:
                found.append(Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, microbatch, other))
            elif kind is Kind.F:
                found.append(Action(other, Kind.F, microbatch))
            else:
                found.append(self._backward(other, microbatch))
        return found

    def _backward(self, stage: int, microbatch: int) -> Action:
        split = Action(stage, Kind.I, microbatch)
        return split if split in self._there else Action(stage, Kind.B, microbatch)

    def _error(self, rank: int, position: int, what: str) -> ScheduleError:
        schedule = self._schedule
        at = f"{schedule.programs[rank][position]}, action {position} of rank {rank}"
        return ScheduleError(f"{schedule.title}: {at}: {what}\n{pointed(schedule, {rank: position})}")
