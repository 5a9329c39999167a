"""Negotiation: agree on named operations. Events go in, responses come out. [pure]

    submit --> [unannounced] --announce--> announced --agree--> launched, or failed

Each rank submits operations by name, in any order and at any time. In every cycle all ranks announce one bit for each
operation that was agreed on before (`ResponseCache`), and the full request for any other operation. The bits are
combined by "and", the requests are gathered, and every rank passes the same data to `agree`. All ranks therefore launch
the same operations in the same order. An operation is launched in the cycle in which the last rank announces it.

A rank that has joined has no data left. It counts as having announced every operation, and takes part without data.

A rank that restarts returns to a point from which all ranks can start again. From its announcement until all ranks have
restarted, nothing carries over to the next cycle: an operation that some rank does not submit in the same cycle is
cancelled on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commlib.coordinator.op_request import OpRequest, describe_difference, format_ranks, quote_names
from commlib.coordinator.response_cache import ResponseCache

JOIN = "join"
RESTART = OpRequest("restart", "elastic.run", repeats=False)


class Launch(NamedTuple):
    """All ranks except those that have joined have submitted the operation: run it now."""

    request: OpRequest
    joined: frozenset[int] = frozenset()


class Failure(NamedTuple):
    """The operation can never run. `late`: ranks missed the deadline; otherwise, ranks disagree."""

    request: OpRequest
    reason: str
    late: bool = False


class JoinEnd(NamedTuple):
    """All ranks have joined, rank `last` at the end."""

    request: OpRequest
    last: int


class Restart(NamedTuple):
    """Ranks `by` restart: this rank's requests will not run, except a restart of its own.

    complete: all ranks have restarted, so later requests will run.
    """

    request: OpRequest
    by: tuple[int, ...]
    complete: bool


Response = Launch | Failure | JoinEnd | Restart


class RequestList(NamedTuple):
    """The full data of a rank: requests that are not cached and, on request, the operations that it waits for."""

    requests: tuple[OpRequest, ...] = ()
    expired: tuple[str, ...] = ()
    """Names of operations that this rank no longer waits for."""
    waits_for: tuple[str, ...] = ()
    """Names of all operations that this rank waits for, if some rank has waited long."""


class Announcement(NamedTuple):
    """The announcement of a rank in a cycle."""

    bits: int
    """The bits of cached names that it waits for."""
    width: int
    """Number of bits, the same on all ranks."""
    requests: tuple[OpRequest, ...]
    """Requests without a bit."""


class Negotiation:
    """Negotiates for one rank.

    members: the names of the ranks 0, 1, ... of the group, in messages and as roots. capacity: the number of cached
    names. Both are the same on all ranks.
    """

    def __init__(self, rank: int, members: Sequence[int], *, capacity: int = 4096) -> None:
        self._rank, self._members, self._size = rank, tuple(members), len(members)
        self._cache = ResponseCache(capacity)
        self._launches: dict[int, Launch] = {}  # by bit, cached because they are many
        self._waiting: dict[str, OpRequest] = {}  # this rank's requests without a response
        self._unannounced: dict[str, OpRequest] = {}  # those to announce in full
        self._bits = 0  # those to announce by bit
        self._has_new_bits = False
        self._announced: dict[str, dict[int, OpRequest]] = {}  # by name and rank
        self._joined: list[int] = []  # in the order in which they joined
        self._restarting: set[int] = set()

    @property
    def waiting(self) -> dict[str, OpRequest]:
        """This rank's requests that have no response yet, by name."""
        return self._waiting

    @property
    def announced(self) -> Mapping[str, Mapping[int, OpRequest]]:
        """Fully announced requests that have no response yet, by name and rank of the group."""
        return self._announced

    @property
    def has_unannounced(self) -> bool:
        """Whether this rank has requests that it has not announced."""
        return self._has_new_bits or bool(self._unannounced)

    def submit(self, request: OpRequest) -> None:
        """Submit an operation. Raises ValueError if one of this name is pending on this rank."""
        name = request.name
        if name in self._waiting:
            raise ValueError(self.refusal(request))
        self._waiting[name] = request
        bit = self._cache.bit(request)
        if bit is None:
            self._unannounced[name] = request
        else:
            self._bits |= 1 << bit
            self._has_new_bits = True

    def refusal(self, request: OpRequest) -> str:
        """Return the reason to refuse a request whose name is pending on this rank."""
        return (
            f"{request}: an operation of this name is in flight already ({self._waiting[request.name]}): give "
            "operations that are in flight together different names, or wait for the first"
        )

    def withdraw(self, request: OpRequest) -> None:
        """Withdraw a request that was submitted and not yet announced."""
        if self._waiting.pop(request.name, None) is not None:
            self._unannounced.pop(request.name, None)
            bit = self._cache.bit(request)
            if bit is not None:
                self._bits &= ~(1 << bit)

    def announce(self) -> Announcement:
        """Return this rank's announcement for this cycle, and mark its requests as announced.

        A rank that has joined announces all bits.
        """
        requests = tuple(self._unannounced.values())
        self._unannounced.clear()
        self._has_new_bits = False
        bits = self._cache.all_bits if self._rank in self._joined else self._bits
        return Announcement(bits, self._cache.highest, requests)

    def agree(self, bits: Sequence[int], everyone: Sequence[RequestList] = ()) -> list[Response]:
        """Process the announcements of all ranks; return the responses, in the same order on all ranks.

        bits: the bits that all ranks announced. everyone: the request list of each rank, by rank, if any rank had one.
        """
        responses: list[Response] = []
        if bits:
            self._bits &= ~sum(1 << bit for bit in bits)
            launches = [self._launches[bit] for bit in bits]
            if self._joined:
                responses += [self._launched(launch.request) for launch in launches]
            else:
                responses += launches
                for launch in launches:
                    self._waiting.pop(launch.request.name, None)
        if everyone:
            responses += self._take_up(everyone)
        if self._restarting:
            responses.append(self._restart())
        return responses

    def _take_up(self, everyone: Sequence[RequestList]) -> list[Response]:
        """Process the full requests of all ranks; return the responses."""
        responses: list[Response] = []
        for name in self._take_in(everyone):
            if (response := self._response(name)) is not None:
                responses.append(response)
        decided = {response.request.name for response in responses}
        expired = {name for requests in everyone for name in requests.expired} - decided
        responses += filter(None, [self._give_up(name, everyone) for name in sorted(expired)])
        if len(self._joined) == self._size:
            self._waiting.pop(JOIN, None)
            responses.append(JoinEnd(OpRequest(JOIN, JOIN), self._members[self._joined[-1]]))
            self._joined.clear()
        return responses

    def _take_in(self, everyone: Sequence[RequestList]) -> list[str]:
        """Record the full requests; return the names that may get a response."""
        changed: dict[str, None] = {}
        some_joined = False
        for rank, theirs in enumerate(everyone):
            for request in theirs.requests:
                if request.verb == RESTART.verb:
                    self._restarting.add(rank)
                    continue
                if request.verb == JOIN:
                    self._joined.append(rank)
                    some_joined = True
                    continue
                self._announced.setdefault(request.name, {})[rank] = request
                changed[request.name] = None
        for name in changed:
            if name in self._cache:  # some rank submits another request under this name
                self._forget(name)
        # A rank that joins may be the last one that others waited for.
        return list(self._announced) if some_joined else list(changed)

    def _restart(self) -> Restart:
        """Drop all requests, except this rank's restart if it is not complete, and all joins."""
        name, by = RESTART.name, tuple(self._members[rank] for rank in sorted(self._restarting))
        complete = len(by) == self._size
        is_waiting, is_unannounced = name in self._waiting and not complete, name in self._unannounced
        for table in (self._waiting, self._unannounced, self._announced, self._joined):
            table.clear()
        self._bits, self._has_new_bits = 0, False
        if is_waiting:
            self._waiting[name] = RESTART
        if is_unannounced:
            self._unannounced[name] = RESTART
        if complete:
            self._restarting.clear()
        return Restart(RESTART, by, complete)

    def _response(self, name: str) -> Response | None:
        requests = self._announced[name]
        if len(requests) + sum(rank not in requests for rank in self._joined) < self._size:
            return None
        del self._announced[name]
        request = next(iter(requests.values()))
        if difference := describe_difference({self._members[rank]: request for rank, request in requests.items()}):
            return self._failed(Failure(request, f"the ranks disagree: {difference}"))
        if request.repeats:
            if self._cache.is_full:
                self._forget(self._cache.oldest)
            self._launches[self._cache.add(request)] = Launch(request)
        return self._launched(request)

    def _launched(self, request: OpRequest) -> Response:
        self._waiting.pop(request.name, None)
        if not self._joined:
            return Launch(request)
        root = request.option("root", -1)
        if root in [self._members[rank] for rank in self._joined]:
            return Failure(request, f"its root, rank {root}, has joined and has no data")
        return Launch(request, frozenset(self._joined))

    def _failed(self, failure: Failure) -> Failure:
        self._waiting.pop(failure.request.name, None)
        return failure

    def _give_up(self, name: str, everyone: Sequence[RequestList]) -> Failure | None:
        """Fail an operation that some rank no longer waits for, on all ranks that wait for it."""
        late = self._late(name, everyone)
        if not late:
            return None  # the last rank has just announced it
        request = self._waiting.pop(name, OpRequest("operation", name))
        self._unannounced.pop(name, None)
        self._announced.pop(name, None)
        if name == RESTART.name:
            self._restarting.clear()
        if name in self._cache:
            self._forget(name)
        return Failure(request, self._explain(late, everyone), late=True)

    def explain(self, name: str, everyone: Sequence[RequestList]) -> str:
        """Return which ranks have not submitted an operation, and what they wait for instead; "" if all have."""
        late = self._late(name, everyone)
        return self._explain(late, everyone) if late else ""

    def _late(self, name: str, everyone: Sequence[RequestList]) -> list[int]:
        joined = set(self._joined)
        return [rank for rank, theirs in enumerate(everyone) if name not in theirs.waits_for and rank not in joined]

    def _explain(self, late: Sequence[int], everyone: Sequence[RequestList]) -> str:
        waits = [f"rank {self._members[rank]} waits for {quote_names(everyone[rank].waits_for)}" for rank in late]
        return f"not submitted by {format_ranks([self._members[rank] for rank in late])}; {'; '.join(waits)}"

    def _forget(self, name: str) -> None:
        """Free a name's bit. If this rank has announced the request only by bit, it must announce it in full."""
        bit = self._cache.remove(name)
        self._bits &= ~(1 << bit)
        if name in self._waiting and self._rank not in self._announced.get(name, {}):
            self._unannounced[name] = self._waiting[name]
