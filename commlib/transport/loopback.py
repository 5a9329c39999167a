"""Loopback: ranks as threads of one process, to test every collective without MPI.

It is stricter than MPI: a send completes only once its receive is posted. So a schedule that relies on buffering hangs
in tests (until its timeout), instead of on a user's cluster.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commlib.errors import TransportError
from commlib.protocols import SharedMemory
from commlib.transport.base import (
    Gather,
    PersistentMessage,
    PersistentRound,
    Pieces,
    ProbedReceive,
    Request,
    Space,
    WaitHook,
)


class _Message:
    """A posted send or receive; it waits for its match."""

    __slots__ = ("buffer", "done", "key", "nbytes", "network", "queue")

    def __init__(self, network: Network, queue: str, key: tuple[int, ...], buffer: memoryview) -> None:
        self.network, self.queue, self.key, self.buffer = network, queue, key, buffer
        self.done, self.nbytes = False, 0

    def test(self) -> bool:
        return self.done

    def cancel(self) -> None:
        self.withdraw()

    def withdraw(self) -> bool:
        with self.network.changed:
            waiting = self.network.posted[self.queue][self.key]
            if self in waiting:
                waiting.remove(self)
                return True
            return False


class Network:
    """The state that the threads share: posted messages, and the values of collective set-up calls."""

    def __init__(self, nodes: Sequence[int], devices: Sequence[str] = ()) -> None:
        self.nodes = tuple(nodes)  # the node of each world rank
        self.devices = tuple(devices)  # kinds of devices whose memory this process can read directly
        self.changed = threading.Condition()
        self.posted: dict[str, dict[tuple[int, ...], deque[_Message]]] = {
            "send": defaultdict(deque),
            "recv": defaultdict(deque),
        }
        self._exchanges: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._contexts = itertools.count(1)

    def post(self, queue: str, key: tuple[int, ...], buffer: memoryview) -> _Message:
        message = _Message(self, queue, key, buffer)
        with self.changed:
            partners = self.posted["recv" if queue == "send" else "send"][key]
            if not partners:
                self.posted[queue][key].append(message)
                return message
            partner = partners.popleft()
            sending, received = (message, partner) if queue == "send" else (partner, message)
            sending.nbytes = received.nbytes = len(sending.buffer)
            if len(sending.buffer) > len(received.buffer):
                received.nbytes = -1
            else:
                received.buffer[: len(sending.buffer)] = sending.buffer
            sending.done = received.done = True
            self.changed.notify_all()
        return message

    def exchange(self, key: tuple[Any, ...], rank: int, size: int, value: Any) -> list[Any]:
        """Exchange one value among all ranks of a group."""
        with self.changed:
            values = self._exchanges.setdefault(key, {})
            values[rank] = value
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(values) == size, timeout=60):
                raise TransportError(f"loopback: only ranks {sorted(values)} of {size} arrived at {key}")
            return [values[rank] for rank in range(size)]

    def new_context(self) -> int:
        return next(self._contexts)


class LoopbackSharedMemory:
    """Shared memory of ranks in one process: they use the same addresses."""

    def __init__(self, own: Any, bases: list[int], nbytes: int) -> None:
        self._own, self.bases, self.nbytes = own, bases, nbytes

    def close(self) -> None:
        pass


class _PreparedRound:
    def __init__(self, transport: LoopbackTransport, sends: Any, recvs: Any, tag: int) -> None:
        self._transport, self._sends, self._recvs, self._tag = transport, sends, recvs, tag
        self.handles = np.zeros(0, np.uint8)
        self._requests: list[Any] = []

    def run(self, on_wait: WaitHook) -> None:
        transport, tag = self._transport, self._tag
        landed = [memoryview(bytearray(sum(map(len, pieces)))) for _, pieces in self._recvs]
        requests = [transport.recv(peer, tag, into) for (peer, _), into in zip(self._recvs, landed, strict=True)]
        requests += [transport.send(peer, tag, memoryview(b"".join(pieces))) for peer, pieces in self._sends]
        self._requests = requests
        try:
            transport.wait(requests, on_wait)
        except BaseException:
            self.give_up()
            raise
        for (_, pieces), message in zip(self._recvs, landed, strict=True):
            for piece in pieces:
                piece[:], message = message[: len(piece)], message[len(piece) :]

    def give_up(self) -> None:
        for request in self._requests:
            request.cancel()


class _PersistentMessage:
    handle_at = 0

    def __init__(self, post: Callable[[], Request]) -> None:
        self._post = post
        self._request: Request | None = None

    def start(self) -> None:
        self._request = self._post()

    def test(self) -> bool:
        return self._request is None or self._request.test()

    def close(self) -> None:
        if self._request is not None:
            self._request.cancel()


class LoopbackTransport:
    """One thread's endpoint in a group of threads. world: the world ranks of the group, in order."""

    native = functions = None
    tags = 2**31

    def __init__(
        self,
        network: Network,
        context: int,
        world: Sequence[int],
        rank: int,
        members: Sequence[int],
        space: Space = Space.COLLECTIVES,
    ) -> None:
        self._network, self._context, self._world, self._space = network, context, tuple(world), space
        self.rank, self.size, self.members = rank, len(world), tuple(members)
        self._exchanges: Counter[tuple[Any, ...]] = Counter()  # shared by this rank's endpoints in parts of the group

    def space(self, space: Space) -> LoopbackTransport:
        args = self._network, self._context, self._world, self.rank, self.members
        return self._part(LoopbackTransport(*args, space))

    def _part(self, other: LoopbackTransport) -> LoopbackTransport:
        other._exchanges = self._exchanges
        return other

    def among(self, ranks: Sequence[int]) -> LoopbackTransport:
        world = [self._world[rank] for rank in ranks]
        rank = ranks.index(self.rank)
        return self._part(LoopbackTransport(self._network, self._context, world, rank, ranks, self._space))

    def _key(self, source: int, target: int, tag: int) -> tuple[int, ...]:
        return (self._context, self._world[source], self._world[target], tag, self._space)

    def accepts(self, device: str) -> bool:
        return device in self._network.devices

    def send(self, peer: int, tag: int, data: Any) -> Request:
        return self._network.post("send", self._key(self.rank, peer, tag), _memory(data))

    def recv(self, peer: int, tag: int, into: Any) -> Request:
        return self._network.post("recv", self._key(peer, self.rank, tag), _memory(into))

    def recv_probed(self, peer: int, tag: int, into: Any) -> ProbedReceive:
        # `post` checks both lengths before it writes.
        return self._network.post("recv", self._key(peer, self.rank, tag), _memory(into))

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        self._wait_for(lambda: all(request.test() for request in requests), on_wait)

    def wait_any(self, requests: Sequence[Request], on_wait: WaitHook) -> list[Request]:
        self._wait_for(lambda: any(request.test() for request in requests), on_wait)
        return [request for request in requests if request.test()]

    def _wait_for(self, complete: Callable[[], bool], on_wait: WaitHook) -> None:
        changed = self._network.changed
        with changed:
            done = complete()
        while not done:
            on_wait()
            with changed:
                done = changed.wait_for(complete, timeout=0.02)

    def persistent_round(self, sends: Sequence[Pieces], recvs: Sequence[Pieces], tag: int) -> PersistentRound:
        return _PreparedRound(self, sends, recvs, tag)

    def persistent_send(self, peer: int, tag: int, data: memoryview) -> PersistentMessage:
        return _PersistentMessage(lambda: self.send(peer, tag, data))

    def persistent_recv(self, peer: int, tag: int, into: memoryview) -> PersistentMessage:
        return _PersistentMessage(lambda: self.recv(peer, tag, into))

    def progress(self) -> bool:
        with self._network.changed:
            sends = self._network.posted["send"].items()
            return any(
                key[0] == self._context and key[2] == self._world[self.rank] and waiting for key, waiting in sends
            )

    def discard(self) -> None:
        """Do nothing: unmatched messages are freed with the network, in this process's memory."""

    def _gather_values(self, what: str, value: Any) -> list[Any]:
        label = what, self._world
        self._exchanges[label] += 1
        key = self._context, *label, self._exchanges[label]
        return self._network.exchange(key, self.rank, self.size, value)

    def split(self, color: int, key: int) -> LoopbackTransport | None:
        wishes = self._gather_values("split", (color, key, self.rank, self._network.new_context()))
        group = sorted((k, r) for c, k, r, _ in wishes if c == color)
        if color < 0:
            return None
        ranks = [rank for _, rank in group]
        context = min(number for c, _, _, number in wishes if c == color)
        world = [self._world[rank] for rank in ranks]
        return LoopbackTransport(self._network, context, world, ranks.index(self.rank), ranks)

    def split_node(self) -> LoopbackTransport:
        node = self.split(self._network.nodes[self._world[self.rank]], self.rank)
        assert node is not None
        return node

    def share(self, nbytes: int, gather: Gather) -> SharedMemory:
        own = np.zeros(nbytes + 64, np.uint8)
        base = (own.ctypes.data + 63) // 64 * 64
        parts = self._gather_values("share", (own, base))
        return LoopbackSharedMemory([part for part, _ in parts], [base for _, base in parts], nbytes)

    def close(self, *, synchronized: bool = True) -> None:
        pass


def _memory(data: Any) -> memoryview:
    """Return the memory without waiting for its device, as a network card accesses it by address."""
    if isinstance(data, memoryview):
        return data
    return memoryview((ctypes.c_uint8 * data.nbytes).from_address(data.address)).cast("B")


def transports(size: int, nodes: Sequence[int] | None = None, devices: Sequence[str] = ()) -> list[LoopbackTransport]:
    """Return the `size` endpoints of one group. `nodes[r]` is the simulated node of rank r (default: all on node 0).

    devices: kinds of devices whose memory it sends and receives directly.
    """
    network = Network(nodes or [0] * size, devices)
    context = network.new_context()
    return [LoopbackTransport(network, context, range(size), rank, range(size)) for rank in range(size)]
