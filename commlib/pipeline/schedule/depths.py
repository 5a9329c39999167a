"""Depths: the number of messages that each link direction must hold, so that no sender waits for room.

The receiver provides the memory for messages: it holds a received message until the backward of its microbatch is done.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from commlib.pipeline.schedule.clock import time
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import RECVS, SENDS
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule, message_releases
from commlib.pipeline.schedule.replay import Replay, direction_of


def deepen(lowered: LoweredSchedule) -> LoweredSchedule:
    """Return a schedule whose link directions hold one message more than their receiver, or more if needed.

    The depth suffices for all messages that are sent and not released if F, I and W take equal times. With other costs
    a sender may wait, but never forever: a direction that would be part of a deadlock gets a greater depth. Raises
    ScheduleError for a schedule that deadlocks at any depth.
    """
    depths = _count_unreleased(lowered)
    while True:
        deepened = replace(lowered, depths=dict(sorted(depths.items())))
        stuck = Replay(deepened).run(lambda rank, position, action: None)
        full = {direction_of(one.action) for one in stuck if one.action.kind in SENDS}
        if not full:
            return deepened
        for way in full:
            depths[way] += 1


def _count_unreleased(lowered: LoweredSchedule) -> dict[LinkDirection, int]:
    """Return the number of messages of each link direction from the oldest unreleased one to the newest sent.

    It is at least the number held at once, plus one in transit.
    """
    schedule = lowered.schedule
    back = message_releases(lowered)
    timing = time(lowered, Costs.even(schedule.stages))
    events: defaultdict[LinkDirection, list[tuple[float, bool, int]]] = defaultdict(list)
    unreleased: defaultdict[LinkDirection, int] = defaultdict(int)
    most: defaultdict[LinkDirection, int] = defaultdict(int)
    for program, spans in zip(schedule.programs, timing.spans, strict=True):
        received: defaultdict[tuple[int, int], list[LinkDirection]] = defaultdict(list)
        for action, (_, end) in zip(program, spans, strict=True):
            if action.kind in SENDS:
                events[direction_of(action)].append((end, True, action.microbatch))
            elif action.kind in RECVS:
                way = direction_of(action)
                received[action.stage, action.microbatch].append(way)
                unreleased[way] += 1
                most[way] = max(most[way], unreleased[way] + 1)
            for key in back.get(action, ()):
                for way in received.pop(key, ()):
                    unreleased[way] -= 1
                    events[way].append((end, False, key[1]))
    for way, changes in events.items():
        waiting: dict[int, int] = {}  # the number of each message, the oldest first
        changes.sort(key=lambda change: change[:2])  # at equal times, releases are first
        sends = 0
        for _, is_sent, microbatch in changes:
            if is_sent:
                waiting[microbatch], sends = sends, sends + 1
                most[way] = max(most[way], sends - next(iter(waiting.values())))
            else:
                del waiting[microbatch]
    return {way: min(depth, schedule.microbatches) for way, depth in most.items()}
