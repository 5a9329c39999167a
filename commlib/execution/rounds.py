"""Rounds: prepared messages and combinations, run by one compiled function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.errors import TransportError
from commlib.kernels.fields import rounds as kernels
from commlib.kernels.machine_code import entry_point
from commlib.transport.base import MessageFunctions, PersistentRound, WaitHook
from commlib.transport.polling import EAGER, poll

_play = entry_point("rounds.play", 3)

_YIELDS = 200  # the number of core yields before a call returns to Python to check on the other ranks


class MessageRound(NamedTuple):
    """Messages, and the addresses of the combinations after their arrival: see `reduce_as_written`."""

    messages: PersistentRound
    addresses: Sequence[int]


class Rounds:
    """Rounds on one buffer, run one after the other, any number of times.

    marks_at: address of numbers that must all be equal at the end, for `all_equal`; 0: none.
    """

    def __init__(
        self, rounds: Sequence[MessageRound], functions: MessageFunctions, marks_at: int, buffer: Array
    ) -> None:
        self._messages = [one.messages for one in rounds]
        self._failure, self._is_cancelled = functions.failure, False
        sizes = [len(one.messages.handles) // functions.handle_bytes for one in rounds]
        addresses = [np.array(one.addresses, np.int64) for one in rounds]
        self._rows = np.array(
            [
                (size, address_of(one.messages.handles), len(here), address_of(here))
                for one, size, here in zip(rounds, sizes, addresses, strict=True)
            ],
            np.int64,
        ).reshape(len(rounds), kernels.ROW_FIELDS)
        self._flag, statuses = np.zeros(1, np.int32), np.zeros(max([1, *sizes]) * functions.status_bytes, np.uint8)
        self._program = program = np.zeros(kernels.PROGRAM_FIELDS, np.int64)
        program[kernels.ROUNDS], program[kernels.ROWS] = len(rounds), address_of(self._rows)
        program[kernels.MARKS] = marks_at
        program[kernels.BUFFER], program[kernels.NBYTES] = address_of(buffer), buffer.nbytes
        program[kernels.START], program[kernels.TEST] = functions.start, functions.test
        program[kernels.FLAG], program[kernels.STATUSES] = address_of(self._flag), address_of(statuses)
        program[kernels.SPINS], program[kernels.YIELDS] = EAGER, _YIELDS
        self._at, self._keep = address_of(program), (addresses, statuses, buffer)

    def run(self, on_wait: WaitHook, source: int = 0, target: int = 0) -> bool:
        """Run the rounds once; return whether all marks were equal.

        source, target: contiguous arrays of the buffer's dtype and size, given by `id`, or 0: `source` is copied to the
        buffer first, and the buffer to `target` at the end unless marks differ. `on_wait` is called during long waits,
        and may raise to give up; the rounds cannot run again then.
        """
        if self._is_cancelled:
            raise TransportError("these messages were given up in flight, and cannot be sent again")
        try:
            status = _play(self._at, source, target)
            if status == kernels.WAITING:
                status = self._wait(on_wait, source, target)
        except BaseException:
            self._give_up()
            raise
        if status == kernels.FAILED:
            self._give_up()
            raise self._failure(int(self._program[kernels.CODE]))
        return bool(status == kernels.DONE)

    def _wait(self, on_wait: WaitHook, source: int, target: int) -> int:
        program, ended = self._program, list[int]()
        program[kernels.SPINS], program[kernels.YIELDS] = 0, 0  # `poll` sleeps in between

        def play() -> bool:
            if (status := _play(self._at, source, target)) != kernels.WAITING:
                ended.append(status)
            return bool(ended)

        try:
            poll(play, on_wait)
        finally:
            program[kernels.SPINS], program[kernels.YIELDS] = EAGER, _YIELDS
        return ended[0]

    def _give_up(self) -> None:
        self._is_cancelled = True
        if self._program[kernels.STARTED]:
            self._messages[int(self._program[kernels.NEXT])].give_up()
