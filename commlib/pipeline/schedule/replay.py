"""Replay lowered programs of all ranks until they are done, or all of them wait.

Ranks wait in two ways only: for a message that has not been sent, and for the room of the message that was sent `depth`
messages before. Each way has one sender and one receiver, so that no timing can change what comes: if this order ends,
every order does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from commlib.pipeline.schedule.ir import RECVS, SENDS, Action, Kind
from commlib.pipeline.schedule.lower import Lowered, Way, handed_back

Seen = Callable[[int, int, Action], None]
"""Called with rank, position and action, in a legal order."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that waits for ever, at which of its actions, and for what."""

    rank: int
    position: int
    action: Action
    why: str


def way_of(action: Action) -> Way:
    """Return the way of a message."""
    return action.link, Kind.F if action.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B


class Replay:
    """What is on the ways while programs run."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._back = handed_back(lowered)
        self._sent: defaultdict[Way, list[int]] = defaultdict(list)
        self._there: set[tuple[Way, int]] = set()
        self._returned: set[tuple[Way, int]] = set()
        self._held: defaultdict[tuple[int, int], list[Way]] = defaultdict(list)
        self._waiting: dict[tuple[str, Way], int] = {}

    def run(self, seen: Seen) -> list[Stuck]:
        """Run all programs; return the ranks that wait for ever."""
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
                seen(rank, at[rank], action)
                at[rank] += 1
        left = [(rank, place) for rank, place in enumerate(at) if place < len(programs[rank])]
        return [Stuck(rank, place, programs[rank][place], self._why(programs[rank][place])) for rank, place in left]

    def _wait(self, action: Action) -> tuple[str, Way] | None:
        """Return what an action waits for: a message, or room for one."""
        if action.kind in RECVS:
            way = way_of(action)
            return None if (way, action.microbatch) in self._there else ("message", way)
        if action.kind in SENDS:
            way = way_of(action)
            before = len(self._sent[way]) - self._lowered.depth(way)
            return None if before < 0 or (way, self._sent[way][before]) in self._returned else ("room", way)
        return None

    def _do(self, action: Action) -> list[int]:
        """Do an action; return the ranks that may go on."""
        woken: list[int] = []
        if action.kind in SENDS:
            way = way_of(action)
            self._sent[way].append(action.microbatch)
            self._there.add((way, action.microbatch))
            woken += self._woken("message", way)
        elif action.kind in RECVS:
            self._held[action.stage, action.microbatch].append(way_of(action))
        for key in self._back.get(action, ()):
            for way in self._held.pop(key, ()):
                self._returned.add((way, key[1]))
                woken += self._woken("room", way)
        return woken

    def _woken(self, what: str, way: Way) -> list[int]:
        rank = self._waiting.pop((what, way), None)
        return [] if rank is None else [rank]

    def _why(self, action: Action) -> str:
        place = self._lowered.schedule.placement
        if action.kind in RECVS:
            return f"waits for {action.other_end} of rank {place[action.peer]}"
        depth = self._lowered.depth(way_of(action))
        return f"waits until rank {place[action.peer]} hands back the message {depth} before it"
