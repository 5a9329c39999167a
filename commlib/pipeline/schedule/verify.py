"""Verify a schedule: every microbatch goes forward and back through all stages, without deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from commlib.pipeline.schedule.depths import deepen
from commlib.pipeline.schedule.ir import (
    COMPUTE,
    RECVS,
    SENDS,
    WEIGHTS,
    Action,
    Kind,
    Link,
    PipelineScheduleError,
    Schedule,
    Weights,
)
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule, lower, needs
from commlib.pipeline.schedule.render import mark_positions
from commlib.pipeline.schedule.replay import Replay, direction_of
from commlib.pipeline.schedule.versions import versions


def verify(schedule: Schedule, links: Sequence[Link] | None = None, *, reduce: bool = False) -> LoweredSchedule:
    """Check a schedule over stages with these links (default: a chain), and return it with its messages.

    The rules: a stage's actions are on the rank of its placement; each microbatch has one F in each stage, and then one
    B, or one I and then one W (or none of them in any stage: a forward-only schedule); an action follows the actions
    that it needs; REDUCE and STEP follow gradients, and no gradient follows its stage's last one. Then all ranks are
    replayed with the final channel depths. Raises ScheduleError with the programs drawn and an arrow at the fault.
    """
    _check_links(schedule, links)
    _Rules(schedule).check()
    lowered = lower(schedule, links, reduce=reduce)
    check_messages(lowered)  # without limits of depth: a deadlock here is one at any depth
    lowered = deepen(lowered)
    check_messages(lowered)
    return lowered


def check_messages(lowered: LoweredSchedule) -> None:
    """Check the messages of a lowered schedule: each has two ends, and no rank waits forever."""
    _Order(lowered).check()
    stuck = Replay(lowered).run(lambda rank, position, action: None)
    if stuck:
        schedule = lowered.schedule
        lines = [f"  rank {one.rank}: {one.action} {one.why}" for one in stuck]
        drawing = mark_positions(schedule, {one.rank: one.position for one in stuck})
        raise PipelineScheduleError("\n".join([f"{schedule.title}: deadlock", *lines, drawing]))


def _check_links(schedule: Schedule, links: Sequence[Link] | None) -> None:
    for link in links or ():
        if not 0 <= link.source < link.target < schedule.stages:
            raise PipelineScheduleError(
                f"{schedule.title}: link {link}: expected one from a stage to a later one of the {schedule.stages}"
            )


class _Rules:
    """The rules for each rank's program on its own."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._done: dict[tuple[int, Kind, int], int] = {}
        self._last_gradient: dict[int, int] = {}

    def check(self) -> None:
        schedule = self._schedule
        for rank in schedule.placement:
            if not 0 <= rank < schedule.ranks:
                raise PipelineScheduleError(f"{schedule.title}: a stage is placed on rank {rank} of {schedule.ranks}")
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
                raise self._error(rank, place, "occurs twice")
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
                    raise self._error(rank, place, f"{Action(stage, kind, microbatch)} has already done that")

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
        """Check that no gradient follows the reduction of its stage's gradients or the update of its weights."""
        for (stage, kind, _), place in self._done.items():
            if kind in WEIGHTS and place < (last := self._last_gradient.get(stage, -1)):
                rank = self._schedule.placement[stage]
                program = self._schedule.programs[rank]
                raise self._error(
                    rank, last, f"comes after {program[place]}, which needs all gradients of stage {stage}"
                )

    def _check_versions(self) -> None:
        """Check that every forward has the version of the weights that it uses."""
        schedule = self._schedule
        for (stage, microbatch), (expected, newest) in versions(schedule).items():
            if expected > newest:
                rank, place = schedule.placement[stage], self._done[stage, Kind.F, microbatch]
                what = f"uses the weights after {expected} updates, but there have been {newest}"
                raise self._error(rank, place, what)

    def _error(self, rank: int, place: int, what: str) -> PipelineScheduleError:
        schedule = self._schedule
        program = schedule.programs[rank]
        at = f"{program[place]}, action {place} of rank {rank}: " if place < len(program) else f"rank {rank}: "
        return PipelineScheduleError(f"{schedule.title}: {at}{what}\n{mark_positions(schedule, {rank: place})}")


class _Order:
    """Checks that each action follows the actions that it needs, and that link directions keep the message order."""

    def __init__(self, lowered: LoweredSchedule) -> None:
        self._lowered, self._schedule = lowered, lowered.schedule
        self._there: set[Action] = set()

    def check(self) -> None:
        place = self._schedule.placement
        ways: dict[LinkDirection, list[list[int]]] = {}
        for rank, program in enumerate(self._schedule.programs):
            for position, action in enumerate(program):
                if action.kind in SENDS | RECVS:
                    ends = ways.setdefault(direction_of(action), [[], []])
                    ends[action.kind in RECVS].append(action.microbatch)
                for needed in self._needed(action):
                    if needed not in self._there:
                        raise self._error(rank, position, f"{needed} must come before it on rank {place[needed.stage]}")
                self._there.add(action)
        for (link, kind), (sends, received) in ways.items():
            if sends != received:
                raise PipelineScheduleError(
                    f"{self._schedule.title}: on link {link}, {kind}: microbatches are sent in the order {sends}, but "
                    f"received in the order {received}"
                )

    def _needed(self, action: Action) -> list[Action]:
        """Return the actions that must precede this one on this rank."""
        place, stage, microbatch = self._schedule.placement, action.stage, action.microbatch
        if action.kind is Kind.SEND_F:
            return [Action(stage, Kind.F, microbatch)]
        if action.kind is Kind.SEND_B:
            return [self._backward(stage, microbatch)]
        needed = []
        for (_, kind), other in needs(self._lowered, action):
            if place[other] != place[stage]:
                needed.append(Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, microbatch, other))
            elif kind is Kind.F:
                needed.append(Action(other, Kind.F, microbatch))
            else:
                needed.append(self._backward(other, microbatch))
        return needed

    def _backward(self, stage: int, microbatch: int) -> Action:
        split = Action(stage, Kind.I, microbatch)
        return split if split in self._there else Action(stage, Kind.B, microbatch)

    def _error(self, rank: int, position: int, what: str) -> PipelineScheduleError:
        schedule = self._schedule
        at = f"{schedule.programs[rank][position]}, action {position} of rank {rank}"
        return PipelineScheduleError(f"{schedule.title}: {at}: {what}\n{mark_positions(schedule, {rank: position})}")
