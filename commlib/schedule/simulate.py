"""Simulate the time and the bytes of a collective before it runs on any machine.

The model: a message of n bytes takes alpha + n beta on its link (the classic one-port model: every rank has one send
port and one receive port, each busy for that long), and every byte that is combined or copied costs its rank gamma.
Pieces for the same rank in the same round follow each other directly and pay alpha once. Waiting messages get free
ports in the order in which they were posted.

A simulation takes some microseconds for each message. Logarithmic algorithms on 16384 ranks take seconds. A ring has
P^2 messages, so 1024 ranks take about ten seconds and 4096 ranks minutes: use the closed formula of its docstring
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from commlib.errors import CommlibError
from commlib.schedule.ir import Round
from commlib.schedule.registry import find
from commlib.schedule.replay import MessageMatcher


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A link from one rank to another: `alpha` seconds for each message and `beta` seconds for each byte."""

    alpha: float
    beta: float


Links = Callable[[int, int], LinkCost]


def nodes(ranks_per_node: int, local: LinkCost, network: LinkCost) -> Links:
    """Return the links of a cluster whose ranks are numbered node by node."""
    return lambda source, target: local if source // ranks_per_node == target // ranks_per_node else network


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """The cost of a run: seconds until the last rank has finished, and the bytes and messages that each rank sends."""

    time: float
    sent: tuple[float, ...]
    messages: tuple[int, ...]


def estimate(
    verb: str,
    name: str,
    size: int,
    nbytes: float,
    links: LinkCost | Links,
    *,
    gamma: float = 0.0,
    root: int = 0,
    segments: int = 1,
) -> SimulatedCost:
    """Simulate a registered algorithm on `size` ranks and `nbytes` of data (its first region, evenly chunked)."""
    chosen = find(verb, name)
    regions = chosen.regions(size, segments)
    ranks = [chosen.rounds(rank, size, root=root, segments=segments) for rank in range(size)]
    return simulate(ranks, nbytes / regions[0] if regions else 0, links, gamma=gamma)


def simulate(
    ranks: Sequence[Iterable[Round]], chunk_bytes: float, links: LinkCost | Links, *, gamma: float = 0.0
) -> SimulatedCost:
    """Simulate the rounds of every rank (`program.rounds`, or a generator), all chunks `chunk_bytes` long.

    Raises CommlibError on a deadlock; `verify` reports the cause.
    """
    return _Simulation(ranks, chunk_bytes, links, gamma).run()


class _SimulatedMessage:
    """One message, or one piece of one. burst: the round and the peer, equal for all pieces of a message."""

    __slots__ = ("burst", "matched", "nbytes", "source", "target")

    def __init__(self, source: int, target: int, nbytes: float, round_index: int) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self.burst = (round_index, target)
        self.matched = False


class _Port:
    """One direction of one rank, and its queue: sends in the order of posting, receives in the order of matching."""

    __slots__ = ("burst", "busy", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.burst: tuple[int, int] | None = None
        self.waiting: dict[_SimulatedMessage, None] = {}


_RECEIVER = _SimulatedMessage(-1, -1, 0, -1)  # placeholder for a posted receive whose message has not been sent


class _Simulation:
    """Processes events in time order: a rank posts its next round, or a message arrives."""

    def __init__(
        self, ranks: Sequence[Iterable[Round]], chunk_bytes: float, links: LinkCost | Links, gamma: float
    ) -> None:
        size = len(ranks)
        self.rounds = [enumerate(rounds) for rounds in ranks]
        self.chunk_bytes = chunk_bytes
        self.links = links
        self.gamma = gamma
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()  # among events of the same time, the first scheduled is first
        self.channels: MessageMatcher[_SimulatedMessage] = MessageMatcher()
        self.outgoing = [_Port() for _ in range(size)]
        self.incoming = [_Port() for _ in range(size)]
        self.touched: list[_Port] = []
        self.open = [0] * size  # unfinished messages of a rank's round
        self.reduced = [0] * size  # chunks that the rank combines after its round
        self.running = size
        self.sent = [0.0] * size
        self.messages = [0] * size

    def run(self) -> SimulatedCost:
        for rank in range(self.running):
            self._next_round(rank)
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                heappop(self.events)[2]()
            # Assign free ports only after all events of this moment, so their order does not matter.
            for port in self.touched:
                self._start(port)
            self.touched.clear()
        if self.running:
            raise CommlibError(f"{self.running} of {len(self.rounds)} ranks wait forever; verify reports why")
        return SimulatedCost(self.now, tuple(self.sent), tuple(self.messages))

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heappush(self.events, (self.now + delay, next(self.order), action))

    def _next_round(self, rank: int) -> None:
        """Combine the data of the last round, run the copies of the next one, then post it."""
        index, step = next(self.rounds[rank], (0, None))
        chunks = self.reduced[rank]
        if step is None:
            self._at(chunks * self.chunk_bytes * self.gamma, partial(self._finish, rank))
            return
        chunks += sum(len(copy.source) for copy in step.copies)
        self._at(chunks * self.chunk_bytes * self.gamma, partial(self._post, rank, index, step))

    def _finish(self, rank: int) -> None:
        self.running -= 1

    def _post(self, rank: int, index: int, step: Round) -> None:
        self.reduced[rank] = sum(len(recv.span) for recv in step.recvs if recv.reduce)
        self.open[rank] = len(step.sends) + len(step.recvs)
        for send in step.sends:
            message = _SimulatedMessage(rank, send.peer, len(send.span) * self.chunk_bytes, index)
            self.sent[rank] += message.nbytes
            self.messages[rank] += 1
            self.outgoing[rank].waiting[message] = None
            if self.channels.offer(rank, send.peer, True, message) is not None:
                self._match(message)
        for recv in step.recvs:
            waiting = self.channels.offer(recv.peer, rank, False, _RECEIVER)
            if waiting is not None:
                self._match(waiting)
        if not self.open[rank]:
            self._next_round(rank)

    def _match(self, message: _SimulatedMessage) -> None:
        message.matched = True
        self.incoming[message.target].waiting[message] = None
        self.touched.append(self.outgoing[message.source])

    def _start(self, port: _Port) -> None:
        """Start the first message whose two ends are posted and whose two ports are free."""
        if port.busy:
            return
        for message in port.waiting:
            outgoing, incoming = self.outgoing[message.source], self.incoming[message.target]
            if message.matched and not (outgoing.busy or incoming.busy):
                break
        else:
            return
        del outgoing.waiting[message], incoming.waiting[message]
        outgoing.busy = incoming.busy = True
        link = self.links if isinstance(self.links, LinkCost) else self.links(message.source, message.target)
        first_piece = outgoing.burst != message.burst
        outgoing.burst = message.burst
        self._at(link.alpha * first_piece + link.beta * message.nbytes, partial(self._arrive, message))

    def _arrive(self, message: _SimulatedMessage) -> None:
        outgoing, incoming = self.outgoing[message.source], self.incoming[message.target]
        outgoing.busy = incoming.busy = False
        self.touched += (outgoing, incoming)
        for rank in (message.source, message.target):
            self.open[rank] -= 1
            if not self.open[rank]:
                self._next_round(rank)
