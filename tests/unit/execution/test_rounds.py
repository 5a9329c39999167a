"""Rounds of messages as one compiled call; functions of this test stand in for the message library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commlib.buffers.views import address_of
from commlib.errors import TransportError
from commlib.execution.reduce_function import ReduceFunction
from commlib.execution.rounds import MessageRound, Rounds
from commlib.transport.base import MessageFunctions, WaitHook

_Start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_Test = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p)


class Library:
    """Moves messages: each handle is a number; a started one is complete after `patience` tests.

    It records its calls. code: the return value of the next call of `start` or `test`.
    """

    def __init__(self, patience: int, arrive: Callable[[int], None]) -> None:
        self.started: list[tuple[int, ...]] = []
        self.code = {"start": 0, "test": 0}
        self.patience, self._asked, self.arrive = patience, 0, arrive
        self._start, self._test = _Start(self._on_start), _Test(self._on_test)

        def at(function: Any) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0

        addresses = at(self._start), at(self._test)
        self.functions = MessageFunctions(*addresses, 4, 16, failure=lambda code: TransportError(str(code)))

    def _on_start(self, count: int, handles: int) -> int:
        self.started.append(tuple((ctypes.c_int32 * count).from_address(handles)))
        self._asked = 0
        return self.code["start"]

    def _on_test(self, count: int, handles: int, done: Any, statuses: int) -> int:
        ctypes.memset(statuses, 7, 16 * count)
        self._asked += 1
        done[0] = self._asked >= self.patience
        if done[0]:
            self.arrive(len(self.started) - 1)
        return self.code["test"]


class Messages:
    def __init__(self, *handles: int) -> None:
        self.handles, self.given_up = np.array(handles, np.int32).view(np.uint8), 0

    def run(self, on_wait: WaitHook) -> None:
        raise AssertionError("a compiled function starts them")

    def give_up(self) -> None:
        self.given_up += 1


class Setting:
    """Two rounds: arrived data is added to a buffer; the second round also adds a buffer without a message."""

    def __init__(self, patience: int = 1) -> None:
        self.buffer, self.arrivals = np.zeros(3, np.float32), np.zeros((2, 3), np.float32)
        self.marks, self.mark = np.zeros(2, np.int64), np.array([5])
        self.library = Library(patience, self._arrive)
        sums = ReduceFunction("float32", "sum")
        self._calls = [sums.bind([self.buffer, arrival], self.buffer) for arrival in self.arrivals]
        self.messages = [Messages(1, 2), Messages(3)]
        rounds = [MessageRound(m, [call.address]) for m, call in zip(self.messages, self._calls, strict=True)]
        self._written = np.array([address_of(self.marks), 2, address_of(self.mark)], np.int64)
        self.rounds = Rounds(rounds, self.library.functions, address_of(self._written), self.buffer)

    def _arrive(self, number: int) -> None:
        self.arrivals[number % 2] = 10 ** (1 + number % 2)
        self.marks[number % 2] = self.mark[0]


def never() -> None:
    raise AssertionError("this wait is short")


def test_rounds_start_in_order_and_combine_arrived_data() -> None:
    setting = Setting()
    x, y = np.array([1, 2, 3], np.float32), np.zeros(3, np.float32)
    for _ in range(2):
        setting.arrivals[:] = 0
        assert setting.rounds.run(never, id(x), id(y)) is True
        assert (y == x + 110).all() and (x == [1, 2, 3]).all()
    assert setting.library.started == [(1, 2), (3,)] * 2


def test_without_arrays_the_buffer_is_reduced() -> None:
    setting = Setting()
    setting.buffer[:] = 1
    assert setting.rounds.run(never)
    assert (setting.buffer == 111).all()


def test_a_long_wait_calls_its_hook_and_starts_nothing_twice() -> None:
    setting = Setting(patience=10**9)
    x, y = np.ones(3, np.float32), np.zeros(3, np.float32)

    def look() -> None:
        x.fill(7)  # it was copied at the start
        setting.library.patience = 1

    assert setting.rounds.run(look, id(x), id(y))
    assert (x == 7).all()
    assert (y == 111).all() and setting.library.started == [(1, 2), (3,)]


def test_other_marks_do_not_write_the_target() -> None:
    setting = Setting()
    x, y = np.ones(3, np.float32), np.zeros(3, np.float32)
    setting.library.arrive = lambda number: setting.marks.fill(6)
    assert setting.rounds.run(never, id(x), id(y)) is False
    assert not y.any()


def test_an_exception_cancels_the_running_round() -> None:
    setting = Setting(patience=10**9)

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        setting.rounds.run(give_up)
    assert [messages.given_up for messages in setting.messages] == [1, 0]
    with pytest.raises(TransportError, match="given up"):
        setting.rounds.run(never)
    assert setting.library.started == [(1, 2)]


@pytest.mark.parametrize(("where", "given_up"), [("start", [0, 0]), ("test", [1, 0])])
def test_an_error_code_of_the_library_is_raised(where: str, given_up: list[int]) -> None:
    setting = Setting()
    setting.library.code[where] = 42
    with pytest.raises(TransportError, match="42"):
        setting.rounds.run(never)
    assert [messages.given_up for messages in setting.messages] == given_up
    with pytest.raises(TransportError, match="given up"):
        setting.rounds.run(never)
