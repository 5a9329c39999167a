"""Call sequence: count a group's calls on one rank, compare them with the other ranks' calls, and run them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf
from typing import Any

from commlib.config.settings import Config
from commlib.errors import MismatchError
from commlib.group.call_check import StallCheck, compare_messages, explain_difference, mismatch
from commlib.group.group_status import GroupStatus
from commlib.group.waiting import Waiting, WaitWatcher
from commlib.node.board import NodeBoard
from commlib.node.signature import follow, signature
from commlib.transport.base import Transport


class CallSequence:
    """The calls of one group. standing: the group's state, with its failure.

    one_node: whether all ranks are on one node. needs_board: whether the first collective creates a board, by `open`,
    which then calls `use_board`. group: watches the waits.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        config: Config,
        standing: GroupStatus,
        stall_check: StallCheck | None,
        *,
        one_node: bool,
        needs_board: bool,
        group: WaitWatcher,
        open: Callable[[], Any],
    ) -> None:
        self._transport, self._name, self._check = transport, name, config.check
        self._standing, self._stall_check = standing, stall_check
        self._one_node, self._needs_board, self._group, self._open = one_node, needs_board, group, open
        self._count = 0
        self.history = 0
        """Hash of all calls so far that use messages. Every message carries it, in its tag or with its data, so after
        different calls a rank never accepts data of the wrong call."""
        self._comparing = {"never": 0.0, "auto": config.check_first, "always": inf}[config.check]
        """Number of first calls that the ranks compare before they send data, if they have no common board."""

    @property
    def number(self) -> int:
        """The number of the last call, from 1, the same on all ranks; calls that did not match count too."""
        board = self._standing.board
        return board.calls if self._one_node and board is not None else self._count

    def use_board(self, board: NodeBoard) -> None:
        """Count and compare calls on a board from now on."""
        board.calls = self._count
        if self._one_node and self._check != "never":
            self._comparing = inf
        self._needs_board = False

    def perform(self, text: str, run: Callable[..., Any], *arguments: Any, must_match: bool = False) -> Any:
        """Run a call in its turn: compare it with the other ranks' calls if required, then execute it.

        must_match: see `Operation`.
        """
        standing = self._standing
        if standing.failure is not None:
            standing.raise_failure(text)
        board, count = standing.board, self._count + 1
        number = 1 + board.calls if board is not None and self._one_node else count
        # A group's first collective creates its board; set-up calls (split, empty) need none.
        opening = self._needs_board and not must_match
        agreed = False
        try:
            self._count = count
            if board is not None:
                board.calls = number
            if self._stall_check is not None:
                self._stall_check.note(count, text)
            if must_match or opening or count <= self._comparing:
                difference = self._compare(text, must_match or opening)
                if difference is not None:
                    agreed = True  # all ranks raise it, and no data was sent
                    raise difference
            if opening:
                self._open()
            self.history = follow(self.history, text)
            return run(*arguments)
        except BaseException as error:
            standing.note(text, error, out_of_step=not agreed)
            raise
        finally:
            if standing.board is not None:
                standing.board.calls = number  # undo the counts of its inner calls

    def _compare(self, text: str, must_match: bool) -> MismatchError | None:
        """Compare the call on all ranks; return the error if the texts differ.

        If instead a wait in here raises a MismatchError, the late rank is in a different call and does not compare.
        """
        if self._transport.size == 1 or (self._check == "never" and not must_match):
            return None
        texts, board, watch = None, self._standing.board, Waiting(self._group, text)
        if self._one_node and board is not None:
            if not board.barrier(signature(text), watch):
                texts = board.exchange_texts(text, watch)
        else:
            texts = compare_messages(self._transport, self._count, text, watch)
        return None if texts is None else mismatch(self._name, self.number, self._transport.rank, texts)

    def different(self, text: str) -> MismatchError:
        """Return the error for a message whose history hash shows that the sender's calls so far differ."""
        return explain_difference(self._name, text, self._transport.rank, self.number, self._stall_check)


def number_of(calls: CallSequence) -> Callable[[], int]:
    """Return a function that returns the number of the last call, holding no reference to the sequence."""
    weak = weakref.ref(calls)
    return lambda: 0 if (owner := weak()) is None else owner.number
