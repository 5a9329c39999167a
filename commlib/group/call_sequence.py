"""Call sequence: count the calls of a group on one rank, compare them with the other ranks', and run them in turn."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import inf
from typing import Any

from commlib.config.settings import Config
from commlib.errors import MismatchError
from commlib.group.call_check import StallCheck, compare_messages, explain_difference, mismatch
from commlib.group.standing import Standing
from commlib.group.waits import Waits, Watching
from commlib.node.board import NodeBoard
from commlib.node.signature import follow, signature
from commlib.transport.base import Transport


class CallSequence:
    """Count and run the calls of one group. `standing` knows its failures.

    one_node: whether all ranks are on one node. needs_board: whether the first collective makes a board, by `open`,
    which then calls `meet_on`. group: watches waits.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        config: Config,
        standing: Standing,
        stall_check: StallCheck | None,
        *,
        one_node: bool,
        needs_board: bool,
        group: Watching,
        open: Callable[[], Any],
    ) -> None:
        self._transport, self._name, self._check = transport, name, config.check
        self._standing, self._stall_check = standing, stall_check
        self._one_node, self._needs_board, self._group, self._open = one_node, needs_board, group, open
        self._count = 0
        self.history = 0
        """A hash of all calls so far whose data travels by messages. Every message carries it, in its tag or beside its
        data, so that ranks which once called different things never take each other's data for what they expect."""
        self._comparing = {"never": 0.0, "auto": config.check_first, "always": inf}[config.check]
        """Up to which call the ranks compare their calls before they send data, where they do not meet on a board."""

    @property
    def number(self) -> int:
        """The number of the last call, from 1: all ranks count alike, mismatches included."""
        board = self._standing.board
        return board.calls if self._one_node and board is not None else self._count

    def meet_on(self, board: NodeBoard) -> None:
        """Count and compare on a board from now on."""
        board.calls = self._count
        if self._one_node and self._check != "never":
            self._comparing = inf
        self._needs_board = False

    def perform(self, text: str, run: Callable[..., Any], *arguments: Any, meets: bool = False) -> Any:
        """Run a call whose turn has come: compare it with the other ranks' where that is due, then do it.

        meets: see `Operation`.
        """
        standing = self._standing
        if standing.failure is not None:
            standing.raise_failure(text)
        board, count = standing.board, self._count + 1
        number = 1 + board.calls if board is not None and self._one_node else count
        # A group's first collective makes its board; what only sets up (split, empty) needs none.
        opening = self._needs_board and not meets
        agreed = False
        try:
            self._count = count
            if board is not None:
                board.calls = number
            if self._stall_check is not None:
                self._stall_check.note(count, text)
            if meets or opening or count <= self._comparing:
                difference = self._compare(text, meets or opening)
                if difference is not None:
                    agreed = True  # all ranks have it, and nothing else was sent
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
                standing.board.calls = number  # whatever its parts have counted

    def _compare(self, text: str, meets: bool) -> MismatchError | None:
        """Return the error of ranks that have told each other different texts.

        A mismatch that is raised here was found in the wait for a rank that did not compare its call: it is sending it.
        """
        if self._transport.size == 1 or (self._check == "never" and not meets):
            return None
        texts, board, watch = None, self._standing.board, Waits(self._group, text)
        if self._one_node and board is not None:
            if not board.meet(signature(text), watch):
                texts = board.exchange_texts(text, watch)
        else:
            texts = compare_messages(self._transport, self._count, text, watch)
        return None if texts is None else mismatch(self._name, self.number, self._transport.rank, texts)

    def different(self, text: str) -> MismatchError:
        """Return the error of ranks whose calls so far were not the same, as a message with another history told."""
        return explain_difference(self._name, text, self._transport.rank, self.number, self._stall_check)


def number_of(calls: CallSequence) -> Callable[[], int]:
    """Return what returns the number of the last call, without a reference to the sequence."""
    weak = weakref.ref(calls)
    return lambda: 0 if (found := weak()) is None else found.number
