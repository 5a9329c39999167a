"""Call check: compare the calls of all ranks before data moves.

Within a node a comparison costs one synchronisation on the board. Across nodes the ranks all-gather a hash each, which
costs some network latencies, so 'auto' does it only for a group's first calls. After that the hash is part of every
message's tag, so different calls never receive each other's data.
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
    """Return the error that lists the ranks' calls. `texts[i]` is the call of rank `members[i]` (default: rank i).

    by_all: all ranks of the group raise it, before any data is sent.
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
        + ("No data was sent; the group stays usable." if by_all else "The group cannot be used any more.")
    )


def compare_messages(transport: Transport, sequence: int, text: str, on_wait: WaitHook) -> list[str] | None:
    """Return None if all ranks have the same text, else all texts. Collective."""

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


_EXPLAINING = 5.0  # seconds to wait for the calls of the other ranks


def explain_difference(
    group: str, text: str, rank: int, sequence: int, stall_check: StallCheck | None
) -> MismatchError:
    """Return the error for a message whose history hash shows that the sender's calls so far differ."""
    general = MismatchError(
        f"{group}: {text}: rank {rank}: another rank has made a different call in this group, now or earlier (this is "
        f"call number {sequence}). All ranks of a group must make the same calls in the same order. The group cannot "
        "be used any more; COMMLIB_CHECK=always finds the different call before any data is sent."
    )
    if stall_check is None:
        return general
    deadline = time.monotonic() + _EXPLAINING
    try:
        while time.monotonic() < deadline:  # until the other rank compares its calls too
            stall_check.look()
            if stall_check.absent():
                break
            time.sleep(0.01)
    except MismatchError as error:
        return error
    return general


# The number of past calls that a rank keeps for comparison.
_REMEMBERED = 16
_LAST_WORDS = 0  # tag of final messages; calls use their numbers, from 1


@dataclass(slots=True)
class _Exchange:
    """A text sent to another rank and a text received from it. `send` or `receive` may be None."""

    peer: int
    send: Request | None
    receive: Request | None
    theirs: Array

    def text(self) -> str | None:
        """Return the received text, or None if it has not arrived."""
        if self.receive is None or not self.receive.test():
            return None
        return bytes(self.theirs).rstrip(b"\0").decode(errors="replace")


class StallCheck:
    """Compares calls once a wait is long, for groups whose ranks do not share memory.

    A rank that has waited long sends its last calls, by number, to each other rank and posts receives for theirs. Ranks
    that disagree are stuck sooner or later, so both sides reach this point. A rank that leaves, or whose group has
    failed, sends a final message. While all waits are short, no message is sent.
    """

    def __init__(self, transport: Transport, group: str) -> None:
        self._transport, self._group = transport, group
        self._calls: dict[int, str] = {}
        self._posted: dict[int, list[_Exchange]] = {}  # by call number
        self._finals: list[_Exchange] = []
        self._final: _FinalMessage | None = None  # this rank's final message
        self.has_spoken = False
        """Whether this rank has sent, or was sent, messages that may never be received."""

    def note(self, sequence: int, text: str) -> None:
        """Record a call."""
        self._calls[sequence] = text
        self._calls.pop(sequence - _REMEMBERED, None)
        if self._posted:
            for exchange in self._posted.pop(sequence - 2 * _REMEMBERED, []):
                if exchange.receive is not None:
                    exchange.receive.cancel()  # before its array is freed

    def report(self) -> None:
        """Send this rank's calls to the other ranks without receives: it has found a mismatch that they may not see."""
        self._post(listen=False)

    def leave(self, reason: str, *, finished: bool, history: int = -1) -> None:
        """Send the other ranks the final message: this rank makes no further call, with the reason. Never blocks.

        finished: this rank has also completed its part of its last call. history: a hash of its calls, -1: none.
        """
        self.has_spoken |= not finished
        if self._final is None:  # the first reason counts
            self._final = _FinalMessage(max(self._calls, default=0) - (not finished), history, reason)
            self._send_final(self._final)

    def part(self, deadline: float) -> str:
        """Wait for the final messages of ranks that leave with this one, then complete or cancel all messages.

        deadline: waits at most until this time (`time.monotonic`). Returns the ranks that also left, but after
        different calls according to their history hashes, as text, or "".
        """
        # Ranks that leave together receive each other's final messages: some MPI libraries complain of unreceived ones.
        # And MPI may outlive these arrays, so it must not access them any more.
        exchanges = [*self._finals, *itertools.chain.from_iterable(self._posted.values())]
        final: set[int] = set()  # ranks with a final message: their earlier messages have arrived
        for exchange in exchanges:
            awaited = [exchange.send] if exchange.peer in final else [exchange.send, exchange.receive]
            for request in awaited:
                while request is not None and not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-4)
            if exchange.receive is not None and exchange.receive.test():
                final.add(exchange.peer)
            for request in (exchange.send, exchange.receive):
                self.has_spoken |= request is not None and not request.test()
        words = {exchange.peer: _FinalMessage.read(text) for exchange in self._finals if (text := exchange.text())}
        for exchange in exchanges:
            if exchange.receive is not None and not exchange.receive.test():
                exchange.receive.cancel()
        self._posted.clear()
        self._finals.clear()
        self._transport.discard()  # messages of ranks that waited long in calls in which this rank did not
        odd = [peer for peer, final in words.items() if self._final is not None and final.contradicts(self._final)]
        return f"rank {', '.join(map(str, odd))}" if odd else ""

    def look(self) -> None:
        """Send this rank's calls to the other ranks. Raises MismatchError if one of them made a different call."""
        self._post()
        self._receive_finals()
        for sequence, exchanges in self._posted.items():
            for exchange in exchanges:
                if sequence in self._calls and (theirs := exchange.text()) is not None:
                    self._compare(sequence, exchange.peer, theirs)

    def absent(self) -> dict[int, str]:
        """Return the ranks that have reported that they will never reach this rank's call, each with the reason."""
        final = {exchange.peer: _FinalMessage.read(text) for exchange in self._finals if (text := exchange.text())}
        current = max(self._calls, default=0)
        return {peer: words.why for peer, words in final.items() if words.done < current}

    def late(self) -> list[int]:
        """Return the ranks that have not reported, after this rank's long wait, that they wait in its call too."""
        waited_for = self._posted.get(max(self._calls, default=0), [])
        return [exchange.peer for exchange in waited_for if exchange.text() is None]

    def _post(self, *, listen: bool = True) -> None:
        for sequence in sorted(self._calls.keys() - self._posted.keys()):
            self.has_spoken = True
            self._posted[sequence] = self._to_all(sequence, self._calls[sequence], listen=listen)

    def _send_final(self, words: _FinalMessage) -> None:
        receives = {exchange.peer: exchange for exchange in self._finals}
        spoken = self._to_all(_LAST_WORDS, words.written(), listen=not receives)
        for exchange in spoken:
            if (before := receives.get(exchange.peer)) is not None:
                exchange.receive, exchange.theirs = before.receive, before.theirs
        self._finals = spoken

    def _receive_finals(self) -> None:
        if not self._finals:
            self._finals = self._to_all(_LAST_WORDS, None)

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
            f"{self._group}: the ranks do not make the same call (call number {sequence}; found in a long wait):\n"
            f"  rank {rank}: {mine}\n  rank {peer}: {theirs}\n"
            "All ranks of a group must make the same calls in the same order. The group cannot be used any more: its "
            "messages are out of step. COMMLIB_CHECK=always finds this before any data is sent."
        )


@dataclass(frozen=True, slots=True)
class _FinalMessage:
    """A final message: the number of calls that a rank completed, their hash or -1, and why it makes no more."""

    done: int
    history: int
    why: str

    def contradicts(self, other: _FinalMessage) -> bool:
        """Return whether both ranks ended successfully, but with different calls."""
        return -1 not in (self.history, other.history) and (self.done, self.history) != (other.done, other.history)

    def written(self) -> str:
        return f"{self.done} {self.history} {self.why}"

    @classmethod
    def read(cls, text: str) -> _FinalMessage:
        done, history, why = text.split(" ", 2)
        return cls(int(done), int(history), why)
