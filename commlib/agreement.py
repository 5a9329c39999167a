"""Do all ranks make the same call? Asked before data moves.

Within a node the board answers at the price of one meeting. Across nodes the ranks gather a number each, which costs
some network latencies, so 'auto' does it for a group's first calls only; after that the signature is part of every
message's tag, so that different calls can never take each other's data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.errors import MismatchError, PeerError
from commlib.executor import Region, execute
from commlib.schedule import program
from commlib.schedule.layout import even
from commlib.transport.base import Idle, Transport
from commlib.verbs.operation import signature

_TEXT_BYTES = 1024


def mismatch(
    group: str, sequence: int, rank: int, texts: Sequence[str], members: Sequence[int] | None = None
) -> MismatchError:
    """Return the error that says who called what. `texts[i]` is that of rank `members[i]` (default: of rank i)."""
    callers: dict[str, list[int]] = {}
    for caller, text in zip(members or range(len(texts)), texts, strict=True):
        callers.setdefault(text, []).append(caller)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in callers.items()
    ]
    return MismatchError(
        f"{group}: the ranks do not make the same call (call number {sequence}; this is rank {rank}):\n"
        + "\n".join(lines)
        + "\nAll ranks of a group must make the same calls in the same order. Nothing was sent; the group stays usable."
    )


def compare_messages(transport: Transport, sequence: int, text: str, idle: Idle) -> list[str] | None:
    """Return None if all ranks have the same text, else all texts. All ranks must call it as often."""

    def gather(own: Any, tag: str) -> Any:
        gathered = np.zeros((transport.size, own.size), own.dtype)
        gathered[transport.rank] = own
        region = Region(gathered.reshape(-1), even(gathered.size, transport.size))
        bruck = program("all_gather", "bruck", transport.rank, transport.size)
        execute(bruck, [[region]], transport, tag=signature(f"{tag} {sequence}"), idle=idle)
        return gathered

    numbers = gather(np.array([signature(text)], np.int64), "compare")
    if (numbers == numbers[0]).all():
        return None
    own = np.zeros(_TEXT_BYTES, np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    own[: len(data)] = np.frombuffer(data, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in gather(own, "texts")]


# How many past calls a rank still answers for, and what it says once it makes none any more.
_REMEMBERED = 16
_PARTING_SECONDS = 0.2
_PARTING = -2 * _REMEMBERED  # the number of no call, not even of one long past


class LateCheck:
    """Compares calls once a wait is long, for groups whose ranks do not share memory.

    A rank that has waited long sends each other rank its last calls, by number, and posts a receive for theirs. Ranks
    that disagree are stuck, or will be, so both sides come to this sooner or later; a rank that leaves says so in the
    same way. Nothing is sent as long as nobody waits long.
    """

    def __init__(self, transport: Transport, group: str) -> None:
        self._transport, self._group = transport, group
        self._calls: dict[int, str] = {}
        self._posted: dict[int, list[tuple[int, Any, Any, Any]]] = {}  # number -> peer, receive, its array, send
        self._left = False

    def note(self, sequence: int, text: str) -> None:
        """Remember a call."""
        self._calls[sequence] = text
        self._calls.pop(sequence - _REMEMBERED, None)
        if self._posted:
            for _, receive, _, _ in self._posted.pop(sequence - 2 * _REMEMBERED, []):
                if receive is not None:
                    receive.cancel()  # before its array goes

    def tell(self) -> None:
        """Tell the others what this rank called, and listen no more: it knows of a mismatch that they may not see."""
        self._post(listen=False)

    def leave(self, reason: str, *, finished: bool) -> None:
        """Tell those who wait, or will, that this rank makes no further call, and why. Never blocks for long.

        finished: it has also done its part in its last one.
        """
        if self._left:
            return
        self._left = True
        self._calls = {_PARTING: f"{max(self._calls, default=0) - (not finished)} {reason}"}
        self._post()
        # Ranks that leave together take each other's word, so that no message is left behind, of which some MPI
        # libraries complain. And MPI may outlive this process's memory: it must not touch it any more.
        deadline = time.monotonic() + _PARTING_SECONDS
        for exchanges in self._posted.values():
            for _, receive, _, send in exchanges:
                for request in (send, receive):
                    while request is not None and not request.test() and time.monotonic() < deadline:
                        time.sleep(1e-4)
                if receive is not None and not receive.test():
                    receive.cancel()
        self._posted.clear()

    def look(self) -> None:
        """Raise MismatchError if a rank made another call than this one, PeerError if it left instead."""
        self._post()
        missing = {}
        for sequence, exchanges in self._posted.items():
            for peer, request, array, _ in exchanges:
                if request is not None and request.test():
                    text = bytes(array).rstrip(b"\0").decode(errors="replace")
                    if sequence == _PARTING:
                        finished, _, reason = text.partition(" ")
                        if max(self._calls, default=0) > int(finished):
                            missing[peer] = reason
                    elif sequence in self._calls:
                        self._compare(sequence, peer, text)
        if missing:
            mine, rank = self._calls[max(self._calls)], self._transport.rank
            who = "; ".join(f"rank {peer} {reason}" for peer, reason in missing.items())
            error = PeerError(f"{self._group}: {mine}: rank {rank}: waited for a rank that will not come: {who}")
            error.missing = missing
            raise error

    def _post(self, *, listen: bool = True) -> None:
        """Send what is not sent yet, and listen to what the others send of the same."""
        for sequence in sorted({_PARTING, *self._calls} - self._posted.keys()):
            self._posted[sequence] = [
                (peer, *(self._hear(peer, sequence) if listen else (None, None)), None)
                for peer in range(self._transport.size)
                if peer != self._transport.rank
            ]
        for sequence, text in self._calls.items():
            data = text.encode()[:_TEXT_BYTES]
            for index, (peer, receive, array, send) in enumerate(self._posted[sequence]):
                if send is None:
                    own = np.zeros(_TEXT_BYTES, np.uint8)
                    own[: len(data)] = np.frombuffer(data, np.uint8)
                    sending = self._transport.send(peer, sequence, own.data)
                    self._posted[sequence][index] = peer, receive, array, sending

    def _hear(self, peer: int, sequence: int) -> tuple[Any, Any]:
        theirs = np.zeros(_TEXT_BYTES, np.uint8)
        return self._transport.recv(peer, sequence, theirs.data), theirs

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
