"""Standing: tell whether a group's calls still run on this rank, and tell the other ranks when they do not."""

from __future__ import annotations

import logging
from time import monotonic
from typing import NoReturn, Protocol

from commlib.errors import CommlibError, MismatchError, ShutdownError
from commlib.group.call_check import StallCheck
from commlib.node.board import LEFT, NodeBoard
from commlib.process import forks
from commlib.runtime.process import PARTING

log = logging.getLogger("commlib")


class Attached(Protocol):
    """Ends with a group."""

    def leave(self, reason: str) -> None:
        """End on this rank: the group has failed, for a reason, or leaves."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

    def halt(self) -> None:
        """Let nothing move any more, in a forked child."""
        ...


class Standing:
    """Tell how one rank stands in a group.

    stall_check: tells ranks that share no memory, if the group has one. is_seen: whether a parent's board shows this
    rank's end to those on its node. one_node: whether that is all ranks.
    """

    def __init__(self, name: str, rank: int, stall_check: StallCheck | None, *, one_node: bool, is_seen: bool) -> None:
        self._name, self._rank, self._stall_check = name, rank, stall_check
        self._one_node, self._is_seen = one_node, is_seen
        self._attached: list[Attached] = []
        self.board: NodeBoard | None = None
        self.is_open = False  # the ranks have met on the board
        self.failure: CommlibError | None = None  # after it the group's ranks are out of step
        self.is_told = False
        """Whether the group's speaker tells the other ranks of a failure, in words of its own, by `leave`."""

    def attach(self, part: Attached) -> None:
        """Let what has an end of its own, the group's channels for example, end with the group."""
        self._attached.append(part)

    @property
    def is_quiet(self) -> bool:
        """Whether all that this rank and the others have sent each other was or will be taken."""
        return self.failure is None and (self._stall_check is None or not self._stall_check.has_spoken)

    # Failures

    def note(self, text: str, error: BaseException, *, out_of_step: bool) -> None:
        """Let the group fail with what came out of the call `text`; out_of_step: with a mismatch, too."""
        if not isinstance(error, CommlibError):
            self.abandon(text, error)
        elif out_of_step or not isinstance(error, MismatchError):
            self._fail(error)

    def abandon(self, text: str, error: BaseException) -> None:
        """Mark the group as failed: `error`, none of ours, came out of the call `text` before it had run to its end.

        Or so it may be: there is no telling at which instruction a signal handler has raised.
        """
        if self.failure is not None or isinstance(error, CommlibError):
            return
        what = f"{self._name}: {text}: rank {self._rank}: ended half-way by {type(error).__name__}"
        self._fail(ShutdownError(f"{what}; the group runs no more calls"))
        if not self.is_told:
            error.add_note(
                f"commlib: {what}; the other ranks are told, and the group runs no more calls: "
                "make a new one (commlib.shutdown and commlib.init, or split) on all ranks"
            )

    def fail(self, error: CommlibError) -> None:
        """Let the group fail with what came out of no call of it. Idempotent."""
        if self.failure is None:
            self._fail(error)

    def raise_failure(self, text: str) -> NoReturn:
        """Raise an error that says why the call `text` does not run: what the group failed with before."""
        failure = self.failure
        assert failure is not None
        error = type(failure)(str(failure))  # a new one: each would add its traceback to the same
        error.missing = failure.missing
        error.add_note(
            f"commlib: {self._name}: {text}: not run on rank {self._rank}: an earlier call of the group failed"
        )
        raise error

    def _fail(self, error: CommlibError) -> None:
        """Let no call of this group run any more, and tell the other ranks: they are out of step."""
        self.failure = error
        for part in self._attached:
            part.leave(f"has given up this group ({type(error).__name__}: {error})")
        if self.board is not None:
            self.board.fail()
        if isinstance(error, MismatchError):
            if self._stall_check is not None:
                self._stall_check.tell()
        elif not self.is_told:
            self.leave(f"has given up this group ({type(error).__name__}: {error})")

    # The end

    def leave(self, reason: str = "", deadline: float | None = None, *, history: int = -1) -> str:
        """Announce the end, and wait for those that leave with this rank: see `Group.leave`."""
        self.announce(reason, history=history)
        if self._stall_check is None:
            return ""
        odd = self._stall_check.part(monotonic() + PARTING if deadline is None else deadline)
        if not odd:
            return ""
        said = (
            f"{self._name}: rank {self._rank} and {odd} made different calls, which no later one brought to light: "
            "results may be wrong; COMMLIB_CHECK=always finds the call that differs"
        )
        log.error("%s", said)
        return said

    def announce(self, reason: str = "", *, history: int = -1) -> None:
        """Tell the other ranks that this one comes no more. history: a hash of its calls."""
        for part in self._attached:
            part.leave(reason)
        if self.board is not None:
            self.board.leave(reason or LEFT)
        seen = self.is_open or (self._is_seen and not reason)
        if self._stall_check is not None and not (self._one_node and seen):
            finished = not reason and self.failure is None
            self._stall_check.leave(reason or LEFT, finished=finished, history=history if finished else -1)

    def halt(self) -> None:
        """Let nothing run in this forked child."""
        self.failure = forks.refusal(self._name)
        for part in self._attached:
            part.halt()

    def close(self) -> None:
        """Give back what ends with the group."""
        for part in self._attached:
            part.close()
