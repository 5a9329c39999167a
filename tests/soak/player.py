"""One thread that plays its script on one rank, with many works outstanding."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from commlib import Work
from tests.soak.calls import Call, Seat, calls
from tests.soak.script import Script, Step

# The maximum number of outstanding works of a thread; drawn again now and then.
OUTSTANDING = (0, 1, 4, 16, 40)

# How often a thread sleeps before a call, and for how many seconds at most.
PAUSES = ((0.03, 0.002), (0.003, 0.03))


@dataclass(frozen=True, slots=True)
class Pending:
    """A work that nobody has waited for yet."""

    step: Step
    call: Call
    work: Work


class Player(threading.Thread):
    """Plays the number of steps passed to `go`; then it has no outstanding works, and `resting` is set.

    What it draws for itself (to call or to start, when, in which order it waits) differs between ranks. That is
    allowed: every rank makes a team's calls in the script's order, and a waiting rank has made all earlier calls.
    """

    def __init__(self, rank: int, seed: int, number: int, script: Script, seats: dict[int, Seat]) -> None:
        super().__init__(name=f"player-{number}", daemon=True)
        self.rank, self.number = rank, number
        self.played: Counter[str] = Counter()  # verbs, also those of teams without this rank
        self.resting = threading.Event()
        self.failure: BaseException | None = None
        self.step: Step | None = None  # the step that is called or waited for
        self.moved = time.monotonic()  # the time of its last progress
        self.slowest = 0.0, ""  # the longest call or wait in seconds, and its description
        self.pending: list[Pending] = []
        self._script, self.seats = iter(script), seats
        self._chance = random.Random(f"soak {seed}, thread {number}, rank {rank}")
        self._most = 0
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()

    def go(self, steps: int) -> None:
        """Play some more steps."""
        self.resting.clear()
        self.moved = time.monotonic()
        self._orders.put(steps)

    def run(self) -> None:
        try:
            while True:
                for step in itertools.islice(self._script, self._orders.get()):
                    self._play(step)
                while self.pending:
                    self._settle(self._chance.randrange(len(self.pending)))
                self.step = None
                self.resting.set()
        except BaseException as error:
            self.failure = error

    def _play(self, step: Step) -> None:
        self.played[step.verb] += 1
        if self.rank not in step.team.members:
            return
        chance, seat = self._chance, self.seats[step.team.number]
        if step.slot is not None:
            self._settle_slot(step)
        self._pause()
        self._come_to(step)
        for call in calls(step, seat):
            if call.start is not None and (call.only_start or chance.random() < 0.6):
                self.pending.append(Pending(step, call, call.start()))
            else:
                call.check(call.run())
        self._come_from(step)
        if chance.random() < 0.02:
            self._most = chance.choice(OUTSTANDING)
        while len(self.pending) > self._most:
            self._settle(chance.randrange(len(self.pending)))

    def _come_to(self, step: Step) -> None:
        self.step, self.moved = step, time.monotonic()

    def _come_from(self, step: Step) -> None:
        now = time.monotonic()
        if now - self.moved > self.slowest[0]:
            self.slowest = now - self.moved, f"thread {self.number}, rank {self.rank}, {step}"
        self.moved = now

    def _pause(self) -> None:
        for probability, seconds in PAUSES:
            if self._chance.random() < probability:
                time.sleep(self._chance.random() * seconds)

    def _settle_slot(self, step: Step) -> None:
        """An array must not be touched before its work is done."""
        for index in reversed(range(len(self.pending))):
            other = self.pending[index].step
            if (other.team, other.slot) == (step.team, step.slot):
                self._settle(index)

    def _settle(self, index: int) -> None:
        pending = self.pending.pop(index)
        work = pending.work
        self._come_to(pending.step)
        how = self._chance.random()
        if how < 0.2:
            while not work.done():
                time.sleep(1e-4)
            assert work.exception() is None, work.exception()
        elif how < 0.3:
            work.wait(3600)
        result = work.wait() if how < 0.6 else work.result()
        pending.call.check(result)
        self._come_from(pending.step)
