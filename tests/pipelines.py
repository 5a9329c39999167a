"""Random schedules of pipelines, legal and not, and an oracle that knows nothing of messages."""

from __future__ import annotations

import random
from dataclasses import replace

from commlib.pipeline.schedule import Action, Kind, Link, Schedule

Work = list[Action]


def works(stage: int, microbatch: int, *, split: bool) -> Work:
    """Return what a stage does with a microbatch, in order."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    return [Action(stage, kind, microbatch) for kind in kinds]


def random_schedule(seed: int, *, ranks: int | None = None) -> tuple[Schedule, tuple[Link, ...]]:
    """Return a schedule that ends, made by letting a random rank do a random thing that it can do; and its links."""
    chance = random.Random(seed)
    ranks = ranks or chance.randint(1, 4)
    stages = ranks * chance.randint(1, 2) if chance.random() < 0.5 else chance.randint(ranks, ranks + 3)
    place = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(place)
    microbatches = chance.randint(1, 6)
    links = [Link(stage, stage + 1) for stage in range(stages - 1)]
    if stages > 2 and chance.random() < 0.3:
        source = chance.randrange(stages - 2)
        links.append(Link(source, chance.randint(source + 2, stages - 1)))
    splits = {(stage, mb): chance.random() < 0.4 for stage in range(stages) for mb in range(microbatches)}
    left = {key: works(*key, split=split) for key, split in splits.items()}
    done: set[Action] = set()
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    while any(left.values()):
        able = [work[0] for work in left.values() if work and is_able(work[0], done, links)]
        action = chance.choice(able)
        left[action.stage, action.microbatch].pop(0)
        done.add(action)
        programs[place[action.stage]].append(action)
    return Schedule(f"random {seed}", microbatches, tuple(place), tuple(map(tuple, programs))), tuple(links)


def is_able(action: Action, done: set[Action], links: list[Link] | tuple[Link, ...]) -> bool:
    """Return whether what an action needs has been done, wherever."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.W:
        return Action(stage, Kind.I, microbatch) in done
    if kind is Kind.F:
        return all(Action(link.source, Kind.F, microbatch) in done for link in links if link.target == stage)
    behind = [link.target for link in links if link.source == stage]
    return Action(stage, Kind.F, microbatch) in done and all(
        {Action(other, Kind.I, microbatch), Action(other, Kind.B, microbatch)} & done for other in behind
    )


def disturbed(schedule: Schedule, seed: int) -> Schedule:
    """Return a schedule some of whose actions have changed places, or are missing: legal or not."""
    chance = random.Random(seed)
    programs = [list(program) for program in schedule.programs]
    for _ in range(chance.randint(1, 2)):
        program = chance.choice(programs)
        if len(program) > 1:
            first = chance.randrange(len(program) - 1)
            second = first + 1 if chance.random() < 0.7 else chance.randrange(len(program))
            program[first], program[second] = program[second], program[first]
        if program and chance.random() < 0.03:
            program.pop(chance.randrange(len(program)))
    return replace(schedule, programs=tuple(map(tuple, programs)))


def ends(schedule: Schedule, links: tuple[Link, ...]) -> bool:
    """Return whether all programs run to their ends, each action when what it needs is done: without a notion of time.

    Messages that are taken in the order in which they were sent bring no other wait: what was sent earlier is there
    earlier.
    """
    expected = {
        Action(stage, Kind.F, microbatch)
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
    }
    everything = [action for program in schedule.programs for action in program]
    if len(set(everything)) < len(everything) or not expected <= set(everything):
        return False
    backwards = (Kind.B, Kind.I, Kind.W)
    forward_only = not any(action.kind in backwards for action in everything)
    for stage, _, microbatch, _ in expected:
        rest = {kind for kind in backwards if Action(stage, kind, microbatch) in everything}
        if rest not in ({Kind.B}, {Kind.I, Kind.W}) and not forward_only:
            return False
    done: set[Action] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule.programs):
            while at[rank] < len(program) and is_able(program[at[rank]], done, links):
                done.add(program[at[rank]])
                at[rank] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, schedule.programs, strict=True))
