"""Replay lowered programs of all ranks until they end or deadlock.

Ranks wait in two ways only: for a message that has not been sent, and for the slot of the message sent `depth` messages
before. Each link direction has one sender and one receiver, so timing cannot change the received values: if this order
ends, every order does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from commlib.pipeline.schedule.ir import RECVS, SENDS, Action, Kind
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule, message_releases

OnAction = Callable[[int, int, Action], None]
"""Called with rank, position and action, in a legal order."""


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """A rank that waits forever, its action, and the reason."""

    rank: int
    position: int
    action: Action
    why: str


def direction_of(action: Action) -> LinkDirection:
    """Return the link direction of a message."""
    return action.link, Kind.F if action.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B


class Replay:
    """The state of all link directions while programs run."""

    def __init__(self, lowered: LoweredSchedule) -> None:
        self._lowered = lowered
        self._back = message_releases(lowered)
        self._messages: defaultdict[LinkDirection, list[int]] = defaultdict(list)
        self._there: set[tuple[LinkDirection, int]] = set()
        self._returned: set[tuple[LinkDirection, int]] = set()
        self._unreleased: defaultdict[tuple[int, int], list[LinkDirection]] = defaultdict(list)
        self._waiting: dict[tuple[str, LinkDirection], int] = {}

    def run(self, on_action: OnAction) -> list[BlockedRank]:
        """Run all programs; return the ranks that wait forever."""
        programs = self._lowered.schedule.programs
        at = [0] * len(programs)
        ready = deque(range(len(programs)))
        while ready:
            rank = ready.popleft()
            program = programs[rank]
            while at[rank] < len(program):
                action = program[at[rank]]
                if (wait := self._wait(action)) is not None:
                    self._waiting[wait] = rank
                    break
                ready.extend(self._do(action))
                on_action(rank, at[rank], action)
                at[rank] += 1
        blocked = [(rank, place) for rank, place in enumerate(at) if place < len(programs[rank])]
        return [
            BlockedRank(rank, place, programs[rank][place], self._reason(programs[rank][place]))
            for rank, place in blocked
        ]

    def _wait(self, action: Action) -> tuple[str, LinkDirection] | None:
        """Return the condition that an action waits for: a message, or room for one."""
        if action.kind in RECVS:
            way = direction_of(action)
            return None if (way, action.microbatch) in self._there else ("message", way)
        if action.kind in SENDS:
            way = direction_of(action)
            before = len(self._messages[way]) - self._lowered.depth(way)
            return None if before < 0 or (way, self._messages[way][before]) in self._returned else ("room", way)
        return None

    def _do(self, action: Action) -> list[int]:
        """Perform an action; return the ranks that may continue."""
        woken: list[int] = []
        if action.kind in SENDS:
            way = direction_of(action)
            self._messages[way].append(action.microbatch)
            self._there.add((way, action.microbatch))
            woken += self._wake("message", way)
        elif action.kind in RECVS:
            self._unreleased[action.stage, action.microbatch].append(direction_of(action))
        for key in self._back.get(action, ()):
            for way in self._unreleased.pop(key, ()):
                self._returned.add((way, key[1]))
                woken += self._wake("room", way)
        return woken

    def _wake(self, what: str, way: LinkDirection) -> list[int]:
        rank = self._waiting.pop((what, way), None)
        return [] if rank is None else [rank]

    def _reason(self, action: Action) -> str:
        place = self._lowered.schedule.placement
        if action.kind in RECVS:
            return f"waits for {action.other_end} of rank {place[action.peer]}"
        depth = self._lowered.depth(direction_of(action))
        return f"waits until rank {place[action.peer]} releases the message {depth} before it"
