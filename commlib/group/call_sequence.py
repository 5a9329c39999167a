"""Call sequence: count a group's calls on one rank, compare them with the other ranks' calls, and run them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from commlib.config.settings import Config
from commlib.errors import MismatchError
from commlib.group.call_check import compare_messages, explain_difference, mismatch
from commlib.group.group_status import GroupStatus
from commlib.group.waits import Waits, WaitSeries
from commlib.node.signature import follow, signature
from commlib.transport.base import Transport


class CallSequence:
    """The calls of one group. open: creates the board of a node; None if not all ranks share one."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        status: GroupStatus,
        waits: Waits,
        open: Callable[[], object] | None,
    ) -> None:
        self._transport, self._status, self._waits, self._open = transport, status, waits, open
        self._check = config.check
        self._comparing = {"never": 0.0, "auto": config.check_first, "always": inf}[config.check]
        """Number of first calls that the ranks compare before they send data, if they have no common board."""

    def perform(self, text: str, run: Callable[..., Any], *arguments: Any, must_match: bool = False) -> Any:
        """Run a call in its turn: compare it with the other ranks' calls if required, then execute it.

        must_match: see `Operation`.
        """
        status = self._status
        if status.failure is not None:
            status.raise_failure(text)
        board, count = status.board, status.count + 1
        is_on_board = board is not None and status.one_node
        number = 1 + board.calls if is_on_board else count  # type: ignore[union-attr]
        # A group's first collective creates its board; set-up calls (split, empty) need none.
        open = None if must_match or status.is_open else self._open
        agreed = False
        try:
            status.count = count
            if board is not None:
                board.calls = number
            if status.stall_check is not None:
                status.stall_check.note(count, text)
            if must_match or open is not None or count <= self._comparing or (is_on_board and self._check != "never"):
                difference = self._compare(text, must_match or open is not None)
                if difference is not None:
                    agreed = True  # all ranks raise it, and no data was sent
                    raise difference
            if open is not None:
                open()
            status.history = follow(status.history, text)
            return run(*arguments)
        except BaseException as error:
            status.note(text, error, out_of_step=not agreed)
            raise
        finally:
            difference = None  # an error, its traceback and this frame would be a reference cycle
            if status.board is not None:
                status.board.calls = number  # undo the counts of its inner calls

    def _compare(self, text: str, must_match: bool) -> MismatchError | None:
        """Compare the call on all ranks; return the error if the texts differ.

        If instead a wait in here raises a MismatchError, the late rank is in a different call and does not compare.
        """
        status = self._status
        if self._transport.size == 1 or (self._check == "never" and not must_match):
            return None
        texts, board, watch = None, status.board, WaitSeries(self._waits, text)
        if status.one_node and board is not None:
            if not board.barrier(signature(text), watch):
                texts = board.exchange_texts(text, watch)
        else:
            texts = compare_messages(self._transport, status.count, text, watch)
        return None if texts is None else mismatch(status.name, status.call_number, status.rank, texts)

    def different(self, text: str) -> MismatchError:
        """Return the error for a message whose history hash shows that the sender's calls so far differ."""
        status = self._status
        return explain_difference(status.name, text, status.rank, status.call_number, status.stall_check)
