"""Depths: how many messages each way of a schedule must hold, so that no sender waits for room.

Memory for messages is the receiver's: a rank holds what came in until the backward of that microbatch is done there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from commlib.pipeline.schedule.clock import time
from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import RECVS, SENDS
from commlib.pipeline.schedule.lower import Lowered, Way, handed_back
from commlib.pipeline.schedule.replay import Replay, way_of


def deepened(lowered: Lowered) -> Lowered:
    """Return a schedule whose ways hold what its receiver holds at once and one more, or more where that is not enough.

    Enough is what is sent and not handed back where F, I and W take as long. With other costs a sender may wait, but
    never for ever: a way that would be a part of a deadlock is made deeper. Raises ScheduleError for a schedule that
    comes to a halt whatever the depths.
    """
    depths = _unreturned(lowered)
    while True:
        made = replace(lowered, depths=dict(sorted(depths.items())))
        stuck = Replay(made).run(lambda rank, position, action: None)
        full = {way_of(one.action) for one in stuck if one.action.kind in SENDS}
        if not full:
            return made
        for way in full:
            depths[way] += 1


def _unreturned(lowered: Lowered) -> dict[Way, int]:
    """Return how many messages of each way there are from the oldest that is not handed back to the newest sent.

    That, or as many as are held, and one on its way.
    """
    schedule = lowered.schedule
    back = handed_back(lowered)
    timing = time(lowered, Costs.even(schedule.stages))
    events: defaultdict[Way, list[tuple[float, bool, int]]] = defaultdict(list)
    held: defaultdict[Way, int] = defaultdict(int)
    most: defaultdict[Way, int] = defaultdict(int)
    for program, spans in zip(schedule.programs, timing.spans, strict=True):
        received: defaultdict[tuple[int, int], list[Way]] = defaultdict(list)
        for action, (_, end) in zip(program, spans, strict=True):
            if action.kind in SENDS:
                events[way_of(action)].append((end, True, action.microbatch))
            elif action.kind in RECVS:
                way = way_of(action)
                received[action.stage, action.microbatch].append(way)
                held[way] += 1
                most[way] = max(most[way], held[way] + 1)
            for key in back.get(action, ()):
                for way in received.pop(key, ()):
                    held[way] -= 1
                    events[way].append((end, False, key[1]))
    for way, changes in events.items():
        waiting: dict[int, int] = {}  # numbers of messages, the oldest first
        changes.sort(key=lambda change: change[:2])  # what is handed back first makes room at the same time
        sent = 0
        for _, is_sent, microbatch in changes:
            if is_sent:
                waiting[microbatch], sent = sent, sent + 1
                most[way] = max(most[way], sent - next(iter(waiting.values())))
            else:
                del waiting[microbatch]
    return {way: min(depth, schedule.microbatches) for way, depth in most.items()}
