"""Clock: run lowered programs with given costs, and record the time of each action."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from commlib.pipeline.schedule.costs import Costs
from commlib.pipeline.schedule.ir import COMPUTE, RECVS, SENDS, Action, Kind, PipelineScheduleError
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule, last_uses, message_releases
from commlib.pipeline.schedule.replay import Replay, direction_of


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a run. spans: for each rank, (start, end) of each of its actions.

    busy: seconds that each rank computes. peak: the most activations of (stage, microbatch) that each rank holds at
    once; peak_bytes: their bytes. sent: bytes that each rank sends.
    """

    lowered: LoweredSchedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The duration of the batch."""
        return max((spans[-1][1] for spans in self.spans if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they do not compute."""
        whole = self.seconds * len(self.spans)
        return 1 - sum(self.busy) / whole if whole else 0.0


def time(lowered: LoweredSchedule, costs: Costs) -> Timing:
    """Return the times of all actions. Raises ScheduleError on a deadlock."""
    return _Clock(lowered, costs).run()


class _Clock:
    def __init__(self, lowered: LoweredSchedule, costs: Costs) -> None:
        self._lowered, self._costs = lowered, costs
        ranks = lowered.schedule.ranks
        self._now = [0.0] * ranks
        self._spans: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
        self._busy, self._send_counts = [0.0] * ranks, [0] * ranks
        self._arrived: dict[Action, float] = {}
        self._sends: defaultdict[LinkDirection, list[int]] = defaultdict(list)
        self._returned: dict[tuple[LinkDirection, int], float] = {}
        self._last = last_uses(lowered.schedule)
        self._back = message_releases(lowered)
        self._received: defaultdict[tuple[int, int], list[LinkDirection]] = defaultdict(list)

    def run(self) -> Timing:
        stuck = Replay(self._lowered).run(self._on_action)
        if stuck:
            first, title = stuck[0], self._lowered.schedule.title
            raise PipelineScheduleError(f"{title}: rank {first.rank}: {first.action} {first.why}, forever")
        peaks = [self._peak(rank) for rank in range(self._lowered.schedule.ranks)]
        return Timing(
            self._lowered,
            tuple(map(tuple, self._spans)),
            tuple(self._busy),
            tuple(count for count, _ in peaks),
            tuple(nbytes for _, nbytes in peaks),
            tuple(self._send_counts),
        )

    def _on_action(self, rank: int, position: int, action: Action) -> None:
        start = self._now[rank]
        if action.kind in RECVS:
            start = max(start, self._arrived.pop(action))
            self._received[action.stage, action.microbatch].append(direction_of(action))
        elif action.kind in SENDS:
            way = direction_of(action)
            microbatches = self._sends[way]
            before = len(microbatches) - self._lowered.depth(way)
            if before >= 0:
                start = max(start, self._returned[way, microbatches[before]])
            microbatches.append(action.microbatch)
        seconds = self._costs.seconds(action)
        end = start + seconds
        self._now[rank] = end
        self._spans[rank].append((start, end))
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            self._busy[rank] += seconds
        elif action.kind in SENDS:
            self._arrived[action.other_end] = end + self._costs.transit(action.link)
            self._send_counts[rank] += self._costs.messages.get(action.link, 0)
        for key in self._back.get(action, ()):
            for way in self._received.pop(key, ()):
                self._returned[way, key[1]] = end

    def _peak(self, rank: int) -> tuple[int, int]:
        """Return the most activations that a rank holds, and the most bytes."""
        program = self._lowered.schedule.programs[rank]
        count = most = nbytes = most_bytes = 0
        for action in program:
            size = self._costs.activations[action.stage] if self._costs.activations else 0
            if action.kind is Kind.F:
                count, nbytes = count + 1, nbytes + size
                most, most_bytes = max(most, count), max(most_bytes, nbytes)
            if action.kind in COMPUTE and self._last[action.stage, action.microbatch] == action:
                count, nbytes = count - 1, nbytes - size
        return most, most_bytes
