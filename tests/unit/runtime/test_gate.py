"""Gates: what a builtin runs itself, what it leaves to Python, and what it does to the lock and its arguments."""

from __future__ import annotations

import sys
import threading
from collections import deque

import numpy as np
import pytest

from commlib.buffers.views import address_of
from commlib.kernels import machine_code
from commlib.kernels.fields.gate import ANY_ARRAY, NOTHING, OTHER_ARRAY, SAME_ARRAY
from commlib.runtime.gate import Gate, GatedVerb, gate_plan

pytestmark = pytest.mark.skipif(not machine_code.HAS_BUILTINS, reason="this Python has no builtins of commlib")


class Verb:
    """A verb with one kind of call, whose kernel returns `status`, and what Python is told of it."""

    text = "all_reduce of 6 x float32"

    def __init__(self, result: int = ANY_ARRAY, result_shape: tuple[int, ...] = (3, 2), *, status: int = 0) -> None:
        self.lock, self.noted, self.resumed = threading.Lock(), deque[str](), list[tuple[int, object, object]]()
        self.gate = Gate(self.lock, self.noted.append)
        # `all_equal` returns 1 for no numbers, and 0 for a number that differs.
        self._number, self._table = np.array([2]), np.zeros(3, np.int64)
        self._table[:] = address_of(self._number), 1 - status, address_of(self._table)
        self.address, self.kernel = address_of(self._table), machine_code.address("node.all_equal")
        self.x, self.y = np.zeros((3, 2), np.float32), np.zeros(result_shape, np.float32)
        self.gated = GatedVerb(self.gate, "all_reduce")
        self.gated.add(self, (self.x.dtype, (3, 2), "sum", "auto"), result_shape, result)

    def resume(self, status: int, x: object, target: object) -> object:
        self.resumed.append((status, x, target))
        self.lock.release()
        self.gate.resumed()
        return target

    def now(self, x: object, target: object) -> object:
        self.resumed.append((-1, x, target))
        return target

    def call(self, x: object, out: object = None, *others: object) -> object:
        return self.gated.call(x, out, *(others or ("sum", "auto")))


def test_a_known_kind_runs_with_the_lock_and_is_noted():
    verb = Verb()
    assert verb.call(verb.x, verb.y) is verb.y
    assert verb.call(verb.x, verb.x) is verb.x
    new = verb.call(verb.x)
    assert isinstance(new, np.ndarray) and new.shape == (3, 2) and new.dtype == np.float32 and new is not verb.x
    assert list(verb.noted) == [verb.text] * 3 and not verb.lock.locked() and not verb.resumed


def overlapping(verb: Verb) -> tuple[object, object]:
    memory = np.zeros(9, np.float32)
    return memory[:6].reshape(3, 2), memory[3:].reshape(3, 2)


def read_only(verb: Verb) -> tuple[object, object]:
    verb.y.flags.writeable = False
    return verb.x, verb.y


@pytest.mark.parametrize(
    "arguments",
    [
        lambda verb: (verb.x, verb.y, "max", "auto"),
        lambda verb: (verb.x, verb.y, "sum", "ring"),
        lambda verb: (verb.x, verb.y[:2]),
        lambda verb: (verb.x, verb.y.astype(np.float64)),
        lambda verb: (verb.x.astype(np.float64), verb.y),
        lambda verb: (verb.x.T, verb.y),
        lambda verb: (np.zeros((3, 4), np.float32)[:, ::2], verb.y),
        lambda verb: (verb.x.reshape(6), verb.y),
        lambda verb: (np.zeros((3, 2), ">f4"), verb.y),
        lambda verb: (verb.x.view(np.matrix), verb.y),
        lambda verb: (verb.x, verb.y.view(np.matrix)),
        lambda verb: ([1.0], None),
        lambda verb: (None, None),
        lambda verb: (verb.x, [1.0]),
        overlapping,
        read_only,
    ],
)
def test_everything_else_is_left_to_python(arguments):
    verb = Verb()
    assert verb.call(*arguments(verb)) is NotImplemented
    assert not verb.noted and not verb.lock.locked()


def test_a_busy_or_recorded_group_is_left_to_python():
    verb = Verb()
    verb.gate.pending.value = 1
    assert verb.call(verb.x, verb.y) is NotImplemented and not verb.lock.locked()
    verb.gate.pending.value = 0
    with verb.lock:
        assert verb.call(verb.x, verb.y) is NotImplemented
    assert verb.call(verb.x, verb.y) is verb.y


def test_what_a_call_returns():
    nothing = Verb(NOTHING)
    assert nothing.call(nothing.x) is None and nothing.call(nothing.x, nothing.y) is None
    same = Verb(SAME_ARRAY)
    assert same.call(same.x, same.x) is same.x and same.call(same.x, same.y) is NotImplemented
    other = Verb(OTHER_ARRAY, (6, 2))
    assert other.call(other.x, other.y) is other.y and other.call(other.x, other.x) is NotImplemented
    new = other.call(other.x)
    assert isinstance(new, np.ndarray) and new.shape == (6, 2)


def test_python_continues_a_call_that_the_kernel_cannot_finish():
    verb = Verb(status=1)
    assert verb.call(verb.x, verb.y) is verb.y
    ((status, x, target),) = verb.resumed
    assert (status, x is verb.x, target is verb.y, verb.lock.locked()) == (1, True, True, False)

    def fail(*arguments: object) -> object:
        verb.lock.release()
        verb.gate.resumed()
        raise KeyError("x")

    verb.resume = fail  # type: ignore[method-assign, assignment]
    verb.gated.clear()
    verb.gated.add(verb, (verb.x.dtype, (3, 2), "sum", "auto"), (3, 2), ANY_ARRAY)
    with pytest.raises(KeyError):
        verb.call(verb.x)
    assert not verb.lock.locked() and not verb.gate.is_lost


def test_an_exception_that_loses_the_lock_is_seen():
    verb = Verb(status=1)
    verb.gated.clear()
    verb.resume = lambda *arguments: 1 / 0  # type: ignore[method-assign]
    verb.gated.add(verb, (verb.x.dtype, (3, 2), "sum", "auto"), (3, 2), ANY_ARRAY)
    with pytest.raises(ZeroDivisionError):
        verb.call(verb.x)
    assert verb.gate.is_lost


@pytest.mark.parametrize("status", [0, 1])
def test_references_are_balanced(status):
    """A builtin that leaks, or drops what it did not get, is found only after hours."""
    verb = Verb(status=status)
    plan = gate_plan(verb.gate, verb, verb.kernel, verb.x, verb.y, verb.y)
    objects = verb.x, verb.y, verb.text, verb.gated, NotImplemented
    before = [sys.getrefcount(one) for one in objects]
    for _ in range(100):
        verb.call(verb.x, verb.y)
        verb.call(verb.x, verb.x)
        verb.call(verb.x)
        verb.call(verb.x, 3)
        plan()
        verb.resumed.clear()
        verb.noted.clear()
    assert [sys.getrefcount(one) for one in objects] == before


def test_a_plan_runs_its_kernel_or_python():
    verb = Verb()
    value = object()
    plan = gate_plan(verb.gate, verb, verb.kernel, verb.x, verb.y, value)
    assert plan() is value and list(verb.noted) == [verb.text] and not verb.resumed
    verb.gate.pending.value = 1
    assert plan() is value and verb.resumed == [(-1, verb.x, verb.y)]


def test_many_kinds_replace_each_other():
    """The table has a fixed number of rows. A call must never run another kind's kernel."""
    verb = Verb()
    kinds = [np.zeros((number, 2), np.float32) for number in range(1, 600)]
    for x in kinds:
        verb.gated.add(verb, (x.dtype, x.shape, "sum", "auto"), x.shape, ANY_ARRAY)
    results = [verb.call(x, x) for x in kinds]
    assert all(result is x or result is NotImplemented for result, x in zip(results, kinds, strict=True))
    known = sum(result is not NotImplemented for result in results)
    assert 30 < known <= 64
