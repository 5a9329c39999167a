"""Negotiation: agree on named operations. Events go in, responses come out. [pure]

    submit --> [to tell] --announce--> told --agree--> launched, or failed

Each rank submits operations by name, in any order and at any time. In every cycle all ranks announce: one bit for each
operation that was agreed on before (`ResponseCache`), the whole request for any other. The bits are combined by "and",
the requests are gathered, and every rank puts the same answer through `agree`, so all launch the same operations in the
same order. An operation is launched in the cycle when the last rank has announced it.

A rank that has joined has no data left. It counts as having announced everything, and takes part with nothing.

A rank that restarts goes back to where all ranks can begin again. From the cycle in which it says so until all have,
nothing is kept from one cycle to the next: whatever not all ranks ask for in one cycle is given up on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commlib.coordinator.request import Request, describe_difference, few, ranks
from commlib.coordinator.response_cache import ResponseCache

JOIN = "join"
RESTART = Request("restart", "elastic.run", repeats=False)


class Launch(NamedTuple):
    """All ranks have asked for the operation, but for those that have joined: run it now."""

    request: Request
    joined: frozenset[int] = frozenset()


class Failure(NamedTuple):
    """The operation can never run. `late`: ranks did not come in time; otherwise, ranks disagree."""

    request: Request
    reason: str
    late: bool = False


class Joined(NamedTuple):
    """All ranks have joined, `last` at the end."""

    request: Request
    last: int


class Restart(NamedTuple):
    """Ranks `by` restart: what this rank has asked for, but for a restart of its own, will not run.

    complete: all ranks do, so that what they ask for from now on will.
    """

    request: Request
    by: tuple[int, ...]
    complete: bool


Response = Launch | Failure | Joined | Restart


class RequestList(NamedTuple):
    """Hold what a rank tells in words: requests that are not cached, and, when asked, what it waits for."""

    requests: tuple[Request, ...] = ()
    expired: tuple[str, ...] = ()
    """Names of operations that this rank will not wait for any longer."""
    waits_for: tuple[str, ...] = ()
    """Names of all operations that this rank waits for, where some rank has waited long."""


class Announcement(NamedTuple):
    """Hold what a rank says in a cycle."""

    bits: int
    """Those of the cached names that it waits for."""
    width: int
    """How many bits there are, the same on all ranks."""
    requests: tuple[Request, ...]
    """What it has to tell in words."""


class Negotiation:
    """Negotiate for one rank.

    members: what the ranks 0, 1, ... of the group are called in messages and as roots. capacity: how many names are
    remembered. Both are the same on all ranks.
    """

    def __init__(self, rank: int, members: Sequence[int], *, capacity: int = 4096) -> None:
        self._rank, self._members, self._size = rank, tuple(members), len(members)
        self._cache = ResponseCache(capacity)
        self._launches: dict[int, Launch] = {}  # by bit, made once: there are many of these
        self._waiting: dict[str, Request] = {}  # of this rank: submitted, no response yet
        self._to_tell: dict[str, Request] = {}  # of those, what has to be told in words
        self._bits = 0  # of those, what has a bit
        self._has_new_bits = False
        self._told: dict[str, dict[int, Request]] = {}  # by name and rank
        self._joined: list[int] = []  # in the order in which they have
        self._restarting: set[int] = set()

    @property
    def waiting(self) -> dict[str, Request]:
        """What this rank has submitted and got no response of, by name."""
        return self._waiting

    @property
    def told(self) -> Mapping[str, Mapping[int, Request]]:
        """What was asked for in words and got no response yet, by name and rank of the group."""
        return self._told

    @property
    def has_unannounced(self) -> bool:
        """Whether the others do not know of everything that was submitted here."""
        return self._has_new_bits or bool(self._to_tell)

    def submit(self, request: Request) -> None:
        """Ask for an operation. Raises ValueError if one of that name is waiting here."""
        name = request.name
        if name in self._waiting:
            raise ValueError(self.refusal(request))
        self._waiting[name] = request
        bit = self._cache.bit(request)
        if bit is None:
            self._to_tell[name] = request
        else:
            self._bits |= 1 << bit
            self._has_new_bits = True

    def refusal(self, request: Request) -> str:
        """Return why a request cannot be submitted whose name is waiting here."""
        return (
            f"{request}: an operation of this name is waiting already ({self._waiting[request.name]}): give each of "
            "those that are in flight together a name of its own, or wait for the first"
        )

    def withdraw(self, request: Request) -> None:
        """Take back what was submitted and not yet announced."""
        if self._waiting.pop(request.name, None) is not None:
            self._to_tell.pop(request.name, None)
            bit = self._cache.bit(request)
            if bit is not None:
                self._bits &= ~(1 << bit)

    def announce(self) -> Announcement:
        """Return what this rank says in this cycle, and note that it has been said.

        A rank that has joined has all bits.
        """
        requests = tuple(self._to_tell.values())
        self._to_tell.clear()
        self._has_new_bits = False
        bits = self._cache.all_bits if self._rank in self._joined else self._bits
        return Announcement(bits, self._cache.highest, requests)

    def agree(self, bits: Sequence[int], everyone: Sequence[RequestList] = ()) -> list[Response]:
        """Take in what all ranks announced; return what follows, in the same order on all ranks.

        bits: those that all ranks have. everyone: the request list of each rank, by rank, if any rank had one.
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
        """Take in what ranks told in words; return what follows."""
        responses: list[Response] = []
        for name in self._take_in(everyone):
            if (response := self._response(name)) is not None:
                responses.append(response)
        decided = {response.request.name for response in responses}
        expired = {name for said in everyone for name in said.expired} - decided
        responses += filter(None, [self._give_up(name, everyone) for name in sorted(expired)])
        if len(self._joined) == self._size:
            self._waiting.pop(JOIN, None)
            responses.append(Joined(Request(JOIN, JOIN), self._members[self._joined[-1]]))
            self._joined.clear()
        return responses

    def _take_in(self, everyone: Sequence[RequestList]) -> list[str]:
        """Note what was told; return the names that a response may be due for."""
        changed: dict[str, None] = {}
        some_joined = False
        for rank, said in enumerate(everyone):
            for request in said.requests:
                if request.verb == RESTART.verb:
                    self._restarting.add(rank)
                    continue
                if request.verb == JOIN:
                    self._joined.append(rank)
                    some_joined = True
                    continue
                self._told.setdefault(request.name, {})[rank] = request
                changed[request.name] = None
        for name in changed:
            if name in self._cache:  # some rank asks for something else under it
                self._forget(name)
        # A rank that joins may be the last that others waited for.
        return list(self._told) if some_joined else list(changed)

    def _restart(self) -> Restart:
        """Forget what was asked for, but for a restart of this rank that is not complete, and all joins."""
        name, by = RESTART.name, tuple(self._members[rank] for rank in sorted(self._restarting))
        complete = len(by) == self._size
        asked, untold = name in self._waiting and not complete, name in self._to_tell
        for kept in (self._waiting, self._to_tell, self._told, self._joined):
            kept.clear()
        self._bits, self._has_new_bits = 0, False
        if asked:
            self._waiting[name] = RESTART
        if untold:
            self._to_tell[name] = RESTART
        if complete:
            self._restarting.clear()
        return Restart(RESTART, by, complete)

    def _response(self, name: str) -> Response | None:
        told = self._told[name]
        if len(told) + sum(rank not in told for rank in self._joined) < self._size:
            return None
        del self._told[name]
        request = next(iter(told.values()))
        if difference := describe_difference({self._members[rank]: said for rank, said in told.items()}):
            return self._failed(Failure(request, f"the ranks disagree: {difference}"))
        if request.repeats:
            if self._cache.is_full:
                self._forget(self._cache.oldest)
            self._launches[self._cache.add(request)] = Launch(request)
        return self._launched(request)

    def _launched(self, request: Request) -> Response:
        self._waiting.pop(request.name, None)
        if not self._joined:
            return Launch(request)
        root = request.option("root", -1)
        if root in [self._members[rank] for rank in self._joined]:
            return Failure(request, f"its root, rank {root}, has joined: it has no data to give")
        return Launch(request, frozenset(self._joined))

    def _failed(self, failure: Failure) -> Failure:
        self._waiting.pop(failure.request.name, None)
        return failure

    def _give_up(self, name: str, everyone: Sequence[RequestList]) -> Failure | None:
        """Fail what some rank will not wait for, on all ranks that wait for it."""
        late = self._late(name, everyone)
        if not late:
            return None  # the last rank has just come
        request = self._waiting.pop(name, Request("operation", name))
        self._to_tell.pop(name, None)
        self._told.pop(name, None)
        if name == RESTART.name:
            self._restarting.clear()
        if name in self._cache:
            self._forget(name)
        return Failure(request, self._explain(late, everyone), late=True)

    def explain(self, name: str, everyone: Sequence[RequestList]) -> str:
        """Return which ranks have not asked for an operation, and what those wait for instead; "" if all have."""
        late = self._late(name, everyone)
        return self._explain(late, everyone) if late else ""

    def _late(self, name: str, everyone: Sequence[RequestList]) -> list[int]:
        joined = set(self._joined)
        return [rank for rank, said in enumerate(everyone) if name not in said.waits_for and rank not in joined]

    def _explain(self, late: Sequence[int], everyone: Sequence[RequestList]) -> str:
        waits = [f"rank {self._members[rank]} waits for {few(everyone[rank].waits_for)}" for rank in late]
        return f"not asked for by {ranks([self._members[rank] for rank in late])}; {'; '.join(waits)}"

    def _forget(self, name: str) -> None:
        """Take a name's bit back. What this rank has announced by it, it has to tell in words."""
        bit = self._cache.remove(name)
        self._bits &= ~(1 << bit)
        if name in self._waiting and self._rank not in self._told.get(name, {}):
            self._to_tell[name] = self._waiting[name]
