"""Replay: run the programs of all ranks in one thread, each until it blocks.

Messages are synchronous, as `ir` defines them: a round ends only when each of its messages has been matched, so a
program that relies on buffering gets stuck here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from commlib.schedule.ir import Recv, Round, Send

T = TypeVar("T")


class MessageMatcher(Generic[T]):
    """Matches sends with receives: between two ranks, in the order in which they were posted."""

    def __init__(self) -> None:
        self._waiting: defaultdict[tuple[int, int], deque[T]] = defaultdict(deque)
        self._sends_wait: dict[tuple[int, int], bool] = {}

    def offer(self, source: int, target: int, is_send: bool, end: T) -> T | None:
        """Post one end of a message; return its other end if that was posted before."""
        key = source, target
        waiting = self._waiting[key]
        if waiting and self._sends_wait[key] != is_send:
            return waiting.popleft()
        self._sends_wait[key] = is_send
        waiting.append(end)
        return None


class PostedRound:
    """A posted round of one rank. `inbox[i]` is the source of receive i: (the sender's step, the index of its send)."""

    __slots__ = ("inbox", "index", "outbox", "rank", "round")

    def __init__(self, rank: int, index: int, round: Round) -> None:
        self.rank = rank
        self.index = index
        self.round = round
        self.outbox: list[PostedRound | None] = [None] * len(round.sends)
        self.inbox: list[tuple[PostedRound, int] | None] = [None] * len(round.recvs)

    @property
    def ended(self) -> bool:
        return None not in self.outbox and None not in self.inbox

    @property
    def waits(self) -> list[Send | Recv]:
        """The sends and receives that have not been matched."""
        sends = zip(self.round.sends, self.outbox, strict=True)
        recvs = zip(self.round.recvs, self.inbox, strict=True)
        ends: list[Send | Recv] = [send for send, other in sends if other is None]
        return ends + [recv for recv, other in recvs if other is None]


def replay(
    ranks: Sequence[Iterable[Round]], posted: Callable[[PostedRound], object], ended: Callable[[PostedRound], object]
) -> list[PostedRound]:
    """Run all rounds of all ranks, calling `posted` and `ended` for each; return the steps that never end."""
    channels: MessageMatcher[tuple[PostedRound, int]] = MessageMatcher()
    streams = [enumerate(rounds) for rounds in ranks]
    current: dict[int, PostedRound] = {}
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        following = next(streams[rank], None)
        if following is None:
            continue
        step = PostedRound(rank, *following)
        current[rank] = step
        posted(step)
        touched = {rank: step}
        for index, send in enumerate(step.round.sends):
            other = channels.offer(rank, send.peer, True, (step, index))
            if other is not None:
                receiver, place = other
                step.outbox[index], receiver.inbox[place] = receiver, (step, index)
                touched[send.peer] = receiver
        for index, recv in enumerate(step.round.recvs):
            other = channels.offer(recv.peer, rank, False, (step, index))
            if other is not None:
                sender, place = other
                step.inbox[index], sender.outbox[place] = other, step
                touched[recv.peer] = sender
        for reached in touched.values():
            if reached.ended:
                ended(reached)
                del current[reached.rank]
                ready.append(reached.rank)
    return list(current.values())
