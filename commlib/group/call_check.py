"""Call check: compare the calls of all ranks before data moves.

Within a node the board answers at the price of one meeting. Across nodes the ranks gather a number each, which costs
some network latencies, so 'auto' does it for a group's first calls only; after that the signature is part of every
message's tag, so that different calls can never take each other's data.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.dtypes import Array
from commlib.errors import MismatchError
from commlib.execution.streaming import Region, execute
from commlib.node.signature import signature
from commlib.schedule import program
from commlib.schedule.layout import even
from commlib.transport.base import Request, Transport, WaitHook

_TEXT_BYTES = 1024


def mismatch(
    group: str,
    sequence: int,
    rank: int,
    texts: Sequence[str],
    members: Sequence[int] | None = None,
    *,
    by_all: bool = True,
) -> MismatchError:
    """Return the error that says who called what. `texts[i]` is that of rank `members[i]` (default: of rank i).

    by_all: all ranks of the group have it, before they have sent anything.
    """
    callers: dict[str, list[int]] = {}
    for caller, text in zip(members or range(len(texts)), texts, strict=True):
        callers.setdefault(text, []).append(caller)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in callers.items()
    ]
    return MismatchError(
        f"{group}: the ranks do not make the same call (call number {sequence}; this is rank {rank}):\n"
        + "\n".join(lines)
        + "\nAll ranks of a group must make the same calls in the same order. "
        + ("Nothing was sent; the group stays usable." if by_all else "The group cannot be used any more.")
    )


def compare_messages(transport: Transport, sequence: int, text: str, on_wait: WaitHook) -> list[str] | None:
    """Return None if all ranks have the same text, else all texts. All ranks must call it as often."""

    def gather(own: Any, tag: str) -> Any:
        gathered = np.zeros((transport.size, own.size), own.dtype)
        gathered[transport.rank] = own
        region = Region(gathered.reshape(-1), even(gathered.size, transport.size))
        bruck = program("all_gather", "bruck", transport.rank, transport.size)
        execute(bruck, [[region]], transport, tag=signature(f"{tag} {sequence}"), on_wait=on_wait)
        return gathered

    numbers = gather(np.array([signature(text)], np.int64), "compare")
    if (numbers == numbers[0]).all():
        return None
    own = np.zeros(_TEXT_BYTES, np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    own[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gather(own, "texts")]


_EXPLAINING = 5.0  # seconds in which to learn from the others what they called instead


def explain_difference(
    group: str, text: str, rank: int, sequence: int, stall_check: StallCheck | None
) -> MismatchError:
    """Return the error of ranks whose calls so far were not the same, as a message with another history told."""
    general = MismatchError(
        f"{group}: {text}: rank {rank}: another rank has called something else in this group, now or before (this is "
        f"call number {sequence}). All ranks of a group must make the same calls in the same order. The group cannot "
        "be used any more; COMMLIB_CHECK=always finds the call that differs before anything is sent."
    )
    if stall_check is None:
        return general
    deadline = time.monotonic() + _EXPLAINING
    try:
        while time.monotonic() < deadline:  # until the other rank comes to compare its calls too
            stall_check.look()
            if stall_check.absent():
                break
            time.sleep(0.01)
    except MismatchError as error:
        return error
    return general


# How many past calls a rank still answers for.
_REMEMBERED = 16
_LAST_WORDS = 0  # the tag of them; those of calls are their numbers, from 1 on


@dataclass(slots=True)
class _Exchange:
    """A text to another rank and a text from it. `send` or `receive` is None where there is none."""

    peer: int
    send: Request | None
    receive: Request | None
    theirs: Array

    def text(self) -> str | None:
        """Return what has come, or None."""
        if self.receive is None or not self.receive.test():
            return None
        return bytes(self.theirs).rstrip(b"\0").decode(errors="replace")


class StallCheck:
    """Compares calls once a wait is long, for groups whose ranks do not share memory.

    A rank that has waited long sends each other rank its last calls, by number, and posts a receive for theirs. Ranks
    that disagree are stuck, or will be, so both sides come to this sooner or later. A rank says so in last words when
    it leaves or its group has failed. Nothing is sent as long as all waits are short.
    """

    def __init__(self, transport: Transport, group: str) -> None:
        self._transport, self._group = transport, group
        self._calls: dict[int, str] = {}
        self._posted: dict[int, list[_Exchange]] = {}  # by number
        self._parting: list[_Exchange] = []
        self._said: _Words | None = None  # as it left
        self.has_spoken = False
        """Whether this rank has sent, or was sent, what may never be taken."""

    def note(self, sequence: int, text: str) -> None:
        """Remember a call."""
        self._calls[sequence] = text
        self._calls.pop(sequence - _REMEMBERED, None)
        if self._posted:
            for exchange in self._posted.pop(sequence - 2 * _REMEMBERED, []):
                if exchange.receive is not None:
                    exchange.receive.cancel()  # before its array goes

    def tell(self) -> None:
        """Tell the others what this rank called, and listen no more: it knows of a mismatch that they may not see."""
        self._post(listen=False)

    def leave(self, reason: str, *, finished: bool, history: int = -1) -> None:
        """Tell those who wait, or will, that this rank makes no further call, and why. Never blocks.

        finished: it has also done its part in its last one. history: a hash of its calls, -1 for none.
        """
        self.has_spoken |= not finished
        if self._said is None:  # the first reason counts
            self._said = _Words(max(self._calls, default=0) - (not finished), history, reason)
            self._say(self._said)

    def part(self, deadline: float) -> str:
        """Wait for the last words of ranks that leave with this one, then let go of all messages.

        deadline: at most until then (`time.monotonic`). Returns which ranks left as well after other calls, or more or
        fewer, as their histories show, or "".
        """
        # Ranks that leave together take each other's word, so that no message is left behind, of which some MPI
        # libraries complain. And MPI may outlive this process's memory: it must not touch it any more.
        exchanges = [*self._parting, *itertools.chain.from_iterable(self._posted.values())]
        said: set[int] = set()  # who has said its last words: what it said before them is there
        for exchange in exchanges:
            awaited = [exchange.send] if exchange.peer in said else [exchange.send, exchange.receive]
            for request in awaited:
                while request is not None and not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-4)
            if exchange.receive is not None and exchange.receive.test():
                said.add(exchange.peer)
            for request in (exchange.send, exchange.receive):
                self.has_spoken |= request is not None and not request.test()
        words = {exchange.peer: _Words.read(text) for exchange in self._parting if (text := exchange.text())}
        for exchange in exchanges:
            if exchange.receive is not None and not exchange.receive.test():
                exchange.receive.cancel()
        self._posted.clear()
        self._parting.clear()
        self._transport.discard()  # what those said that waited long in calls in which this rank did not
        odd = [peer for peer, said in words.items() if self._said is not None and said.contradicts(self._said)]
        return f"rank {', '.join(map(str, odd))}" if odd else ""

    def look(self) -> None:
        """Tell the others that this rank waits. Raises MismatchError if one of them made another call than this one."""
        self._post()
        self._listen()
        for sequence, exchanges in self._posted.items():
            for exchange in exchanges:
                if sequence in self._calls and (theirs := exchange.text()) is not None:
                    self._compare(sequence, exchange.peer, theirs)

    def absent(self) -> dict[int, str]:
        """Return the ranks that have said that they will not come to this rank's call, each with the reason."""
        said = {exchange.peer: _Words.read(text) for exchange in self._parting if (text := exchange.text())}
        current = max(self._calls, default=0)
        return {peer: words.why for peer, words in said.items() if words.done < current}

    def late(self) -> list[int]:
        """Return the ranks that have not said that they wait in this rank's call too, though it has waited long."""
        waited_for = self._posted.get(max(self._calls, default=0), [])
        return [exchange.peer for exchange in waited_for if exchange.text() is None]

    def _post(self, *, listen: bool = True) -> None:
        for sequence in sorted(self._calls.keys() - self._posted.keys()):
            self.has_spoken = True
            self._posted[sequence] = self._to_all(sequence, self._calls[sequence], listen=listen)

    def _say(self, words: _Words) -> None:
        receives = {exchange.peer: exchange for exchange in self._parting}
        spoken = self._to_all(_LAST_WORDS, words.written(), listen=not receives)
        for exchange in spoken:
            if (before := receives.get(exchange.peer)) is not None:
                exchange.receive, exchange.theirs = before.receive, before.theirs
        self._parting = spoken

    def _listen(self) -> None:
        if not self._parting:
            self._parting = self._to_all(_LAST_WORDS, None)

    def _to_all(self, tag: int, text: str | None, *, listen: bool = True) -> list[_Exchange]:
        own = np.zeros(_TEXT_BYTES, np.uint8)
        data = (text or "").encode()[:_TEXT_BYTES]
        own[: len(data)] = np.frombuffer(data, np.uint8)
        exchanges = []
        for peer in range(self._transport.size):
            if peer != self._transport.rank:
                theirs = np.zeros(_TEXT_BYTES, np.uint8)
                receive = self._transport.recv(peer, tag, theirs.data) if listen else None
                send = None if text is None else self._transport.send(peer, tag, own.data)
                exchanges.append(_Exchange(peer, send, receive, theirs))
        return exchanges

    def _compare(self, sequence: int, peer: int, theirs: str) -> None:
        mine, rank = self._calls[sequence], self._transport.rank
        if theirs == mine:
            return
        raise MismatchError(
            f"{self._group}: the ranks do not make the same call (call number {sequence}; found after a long wait):\n"
            f"  rank {rank}: {mine}\n  rank {peer}: {theirs}\n"
            "All ranks of a group must make the same calls in the same order. The group cannot be used any more: its "
            "messages are out of step. COMMLIB_CHECK=always finds this before anything is sent."
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """Last words: how many calls a rank has done, a hash of them or -1, and why it does no other."""

    done: int
    history: int
    why: str

    def contradicts(self, other: _Words) -> bool:
        """Return whether both ranks ended well, and did not do the same calls."""
        return -1 not in (self.history, other.history) and (self.done, self.history) != (other.done, other.history)

    def written(self) -> str:
        return f"{self.done} {self.history} {self.why}"

    @classmethod
    def read(cls, text: str) -> _Words:
        done, history, why = text.split(" ", 2)
        return cls(int(done), int(history), why)
