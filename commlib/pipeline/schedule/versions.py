"""Versions: the weights that each forward uses in schedules with updates, and the number of versions to keep."""

from __future__ import annotations

from collections import Counter

from commlib.pipeline.schedule.ir import COMPUTE, Kind, Schedule, Weights
from commlib.pipeline.schedule.lower import last_uses


def versions(schedule: Schedule) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, by (stage, microbatch), the version of the weights that its forward uses, and the newest version then.

    A version is a number of updates. The microbatches from one update to the next form a batch. `Weights.PREVIOUS`:
    batch t uses W(t - 1), and the first two use W(0), on all stages alike.
    """
    result: dict[tuple[int, int], tuple[int, int]] = {}
    updates: Counter[int] = Counter()
    for program in schedule.programs:
        for action in program:
            if action.kind is Kind.STEP:
                updates[action.stage] += 1
            elif action.kind is Kind.F:
                newest = updates[action.stage]
                previous = max(0, action.microbatch // (schedule.every or schedule.microbatches) - 1)
                expected = previous if schedule.weights is Weights.PREVIOUS else newest
                result[action.stage, action.microbatch] = expected, newest
    return result


def count_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the most versions of its weights that each stage holds at once, including the newest."""
    uses, last = versions(schedule), last_uses(schedule)
    most = [1] * schedule.stages
    newest: Counter[int] = Counter()
    used: dict[int, Counter[int]] = {stage: Counter() for stage in range(schedule.stages)}
    for program in schedule.programs:
        for action in program:
            stage = action.stage
            if action.kind is Kind.STEP:
                newest[stage] += 1
            elif action.kind is Kind.F:
                used[stage][uses[stage, action.microbatch][0]] += 1
            if action.kind in COMPUTE and last[stage, action.microbatch] == action:
                used[stage][uses[stage, action.microbatch][0]] -= 1
            live = {version for version, count in used[stage].items() if count} | {newest[stage]}
            if schedule.weights is Weights.PREVIOUS and newest[stage]:
                live.add(newest[stage] - 1)  # for later forwards
            most[stage] = max(most[stage], len(live))
    return tuple(most)
