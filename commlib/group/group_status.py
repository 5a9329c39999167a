"""Group status: whether a group still runs calls on this rank and on others, and the notice if it does not."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NoReturn, Protocol

from commlib.errors import CommlibError, MismatchError, ShutdownError
from commlib.group.call_check import StallCheck
from commlib.node.board import NodeBoard
from commlib.node.rank_table import LEFT
from commlib.process import forks
from commlib.runtime.process import PARTING

log = logging.getLogger("commlib")


class GroupPart(Protocol):
    """A part of a group that ends with it."""

    def leave(self, reason: str) -> None:
        """End on this rank: the group has failed, with a reason, or this rank leaves."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...

    def halt(self) -> None:
        """Stop in a forked child."""
        ...


class GroupStatus:
    """One rank's status in a group. The parts of the group share it; it holds none of them.

    stall_check: notifies ranks by messages, if the group has one. is_seen: whether a parent's board shows this rank's
    end to the ranks of its node. one_node: whether these are all ranks of the group.
    """

    def __init__(self, name: str, rank: int, stall_check: StallCheck | None, *, one_node: bool, is_seen: bool) -> None:
        self.name, self.rank, self.stall_check, self.one_node = name, rank, stall_check, one_node
        self._is_seen = is_seen
        # Weak, because the parts hold the group: their owners, such as the communicator, keep them alive.
        self._attached: list[weakref.ref[GroupPart]] = []
        self.board: NodeBoard | None = None
        self.is_open = False  # all ranks are on the board
        self.count = 0
        """How many calls `CallSequence` has run; a board that all ranks share counts the others too."""
        self.history = 0
        """Hash of all calls so far that use messages. Every message carries it, in its tag or with its data, so after
        different calls a rank never accepts data of the wrong call."""
        self.failure: CommlibError | None = None  # once set, the group's ranks are out of step
        self.is_reported = False
        """Whether the group's speaker reports a failure to the other ranks, by `leave` (see `Group.speak_for`)."""

    def attach(self, part: GroupPart) -> None:
        """Attach a part, such as the group's channels, that must end with the group."""
        self._attached = [reference for reference in self._attached if reference() is not None]
        self._attached.append(weakref.ref(part))

    def _parts(self) -> Iterator[GroupPart]:
        return (part for reference in self._attached if (part := reference()) is not None)

    @property
    def call_number(self) -> int:
        """The number of the last call, from 1, the same on all ranks; calls that did not match count too."""
        board = self.board
        return board.calls if self.one_node and board is not None else self.count

    @property
    def is_quiet(self) -> bool:
        """Whether all messages between this rank and the others have been or will be received."""
        return self.failure is None and (self.stall_check is None or not self.stall_check.has_spoken)

    # Failures

    def note(self, text: str, error: BaseException, *, out_of_step: bool) -> None:
        """Fail the group with an exception of the call `text`. out_of_step: a mismatch fails it too."""
        if not isinstance(error, CommlibError):
            self.abandon(text, error)
        elif out_of_step or not isinstance(error, MismatchError):
            self._fail(error)

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed: `error`, not a commlib error, may have interrupted the call `text`.

        A signal handler can raise at any instruction, so it is not certain that the call was incomplete.
        """
        if self.failure is not None or isinstance(error, CommlibError):
            return
        what = f"{self.name}: {text}: rank {self.rank}: ended half-way by {type(error).__name__}"
        self._fail(ShutdownError(f"{what}; the group runs no more calls"))
        if not self.is_reported:
            error.add_note(
                f"commlib: {what}; the other ranks are notified, and the group runs no more calls: "
                "make a new group on all ranks (commlib.shutdown and commlib.init, or split)"
            )

    def fail(self, error: CommlibError) -> None:
        """Fail the group with an error outside its calls. Idempotent."""
        if self.failure is None:
            self._fail(error)

    def raise_failure(self, text: str) -> NoReturn:
        """Raise the group's failure again, with a note that the call `text` does not run because of it."""
        failure = self.failure
        assert failure is not None
        error = type(failure)(str(failure))  # a new object: else each raise adds its traceback to the same one
        error.missing = failure.missing
        error.add_note(
            f"commlib: {self.name}: {text}: not run on rank {self.rank}: an earlier call of the group failed"
        )
        raise error

    def _fail(self, error: CommlibError) -> None:
        """Refuse all further calls of this group, and notify the other ranks: the ranks are out of step."""
        self.failure = error
        for part in self._parts():
            part.leave(f"has given up this group ({type(error).__name__}: {error})")
        if self.board is not None:
            self.board.fail()
        if isinstance(error, MismatchError):
            if self.stall_check is not None:
                self.stall_check.report()
        elif not self.is_reported:
            self.leave(f"has given up this group ({type(error).__name__}: {error})")

    # The end

    def leave(self, reason: str = "", deadline: float | None = None) -> str:
        """Announce the end, and wait for ranks that leave too: see `Group.leave`."""
        self.announce(reason)
        if self.stall_check is None:
            return ""
        odd = self.stall_check.part(monotonic() + PARTING if deadline is None else deadline)
        if not odd:
            return ""
        text = (
            f"{self.name}: rank {self.rank} and {odd} made different calls, which caused no error until now: "
            "results may be wrong; COMMLIB_CHECK=always finds the different call"
        )
        log.error("%s", text)
        return text

    def announce(self, reason: str = "") -> None:
        """Notify the other ranks that this rank makes no more calls."""
        for part in self._parts():
            part.leave(reason)
        if self.board is not None:
            self.board.leave(reason or LEFT)
        visible = self.is_open or (self._is_seen and not reason)
        if self.stall_check is not None and not (self.one_node and visible):
            finished = not reason and self.failure is None
            self.stall_check.leave(reason or LEFT, finished=finished, history=self.history if finished else -1)

    def halt(self) -> None:
        """Disable the group in a forked child."""
        self.failure = forks.refusal(self.name)
        for part in self._parts():
            part.halt()

    def close(self) -> None:
        """Close the attached parts."""
        for part in self._parts():
            part.close()


@dataclass(frozen=True, slots=True)
class Liveness:
    """The ranks of a group that have left or failed, read from its board or the board of a group it was split from.
    ranks: for each member of the board in the group, its rank in the group; None: the board belongs to this group.
    """

    board: NodeBoard
    ranks: dict[int, int] | None = None

    def among(self, members: Sequence[int]) -> Liveness:
        """Return the liveness of a group split from this one. members: the ranks of its members in this group."""
        inner = {member: rank for rank, member in enumerate(members)}
        if self.ranks is None:
            return Liveness(self.board, inner)
        return Liveness(self.board, {m: inner[rank] for m, rank in self.ranks.items() if rank in inner})

    def absent(self) -> dict[int, str]:
        """Return the ranks that will never arrive, each with the reason."""
        absent = self.board.absent()
        if self.ranks is None:
            return absent
        return {self.ranks[member]: reason for member, reason in absent.items() if member in self.ranks}

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's epoch on the group's own board; else none."""
        return self.board.late() if self.ranks is None else []
