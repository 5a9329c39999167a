"""A function called on a copy leaves no changes."""

from __future__ import annotations

from functools import partial
from typing import Any

from commlib.pipeline.isolate import isolate

calls: list[int] = []
number = 0


def named(value: int, values_: list[int] = []) -> int:  # noqa: B006
    global number
    number += value
    calls.append(value)
    values_.append(value)
    return number + len(calls) + len(values_)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: int) -> int:
        self.count += value
        return self.count

    def method(self, value: int) -> int:
        return self(value)


def closure() -> tuple[Any, list[int]]:
    values_: list[int] = []
    count = 0

    def call(value: int) -> int:
        nonlocal count
        count += 1
        values_.append(value)
        return len(values_) + count

    return call, values_


def test_module_variables_and_defaults_do_not_change() -> None:
    assert isolate(named)(5) == 5 + 1 + 1
    assert (number, calls, named.__defaults__) == (0, [], ([],))


def test_closures_do_not_change() -> None:
    call, values_ = closure()
    copy = isolate(call)
    assert copy(1) == 2 and copy(1) == 4 and values_ == [] and call(1) == 2


def test_objects_methods_and_partial_functions_do_not_change() -> None:
    counter = Counter()
    for function in (counter, counter.method, partial(Counter.method, counter)):
        assert isolate(function)(3) == 3
    assert counter.count == 0


def test_shared_and_uncopyable_objects_are_used_directly() -> None:
    counter = Counter()
    assert isolate(counter, {id(counter): counter})(2) == 2 and counter.count == 2
    lines = (line for line in "ab")
    assert isolate(lambda: next(lines))() == "a"

    def again(value: int) -> int:
        return again(value - 1) if value else 0

    assert isolate(again)(3) == 0
