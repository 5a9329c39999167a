"""A trial restores each kind of object that a model may hold: counters counted several times for one call."""

from __future__ import annotations

import argparse
import contextvars
import functools
import itertools
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList
from collections.abc import Callable
from enum import Enum
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.snapshot.object_snapshot import ObjectSnapshot
from commlib.snapshot.trial_run import run_trial


def nothing(_: object) -> ObjectSnapshot | None:
    return None


class Named:
    """Something that can be looked up, weakly, too."""


class Base:
    __slots__ = ("count",)


class SlotsAndMore(Base):
    """Has slots of its base and a `__dict__`."""

    def __init__(self) -> None:
        self.count, self.more = 0, 0


class SlotsAndMoreWeak(SlotsAndMore):
    """Can be referred to weakly."""


class SlotList(list[int]):
    __slots__ = ("count",)


class Colour(Enum):
    RED = 1


class Answers:
    """Answers requests for missing attributes, and for its class, with values of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody asks for {name}")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody compares")

    __hash__ = None  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("nobody asks what it is")


class SlotAnswers:
    __slots__ = ("count",)
    count: int

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody asks for {name}")


def add(value: Any) -> None:
    value.count = value.count + 1


def add_both(value: Any) -> None:
    add(value)
    value.more = 1


def append_and_set(value: Any) -> None:
    value.append(1)
    value.count = 1


def of_weak_keys() -> Any:
    one, table = Named(), weakref.WeakKeyDictionary[Any, int]()
    table[one] = 1
    return [one, table]


def change_weak_keys(value: Any) -> None:
    one, table = value
    table[one] += 1
    value[0] = Named()
    table[value[0]] = 3


def weak_values() -> Any:
    return [Named(), weakref.WeakValueDictionary[str, Any]()]


def in_thread(value: Any, change: Callable[[Any], None]) -> None:
    thread = threading.Thread(target=change, args=(value,))
    thread.start()
    thread.join()


def local() -> Any:
    value = threading.local()
    value.count = 0
    return value


def slot_answers() -> Any:
    value = SlotAnswers()
    value.count = 0
    return value


def filled(kind: type) -> Any:
    value = kind()
    for one in (3, 1, 2):
        value.put(one)
    return value


def drained(value: Any) -> list[int]:
    return [value.get_nowait() for _ in range(value.qsize())]


def take_and_put(value: Any) -> None:
    value.get()
    value.put(7)
    value.put(value.get())


def variable(**options: Any) -> Any:
    return contextvars.ContextVar("count", **options)


def set_to(number: int) -> Any:
    value = variable(default=0)
    value.set(number)
    return value


def mocked() -> Any:
    value = Mock()
    value.inner(1)
    return value


class Kind:
    """An object of some kind, a change to it, and its visible state."""

    def __init__(
        self, make: Callable[[], Any], change: Callable[[Any], Any], seen: Callable[[Any], Any] = repr
    ) -> None:
        self.make, self.change, self.seen = make, change, seen


def count_of(value: Any) -> Any:
    return value.count


KINDS = {
    "UserDict": Kind(lambda: UserDict(a=[1]), lambda one: (one["a"].append(1), one.update(b=1))),
    "UserList": Kind(lambda: UserList([1]), lambda one: one.pop()),
    "ChainMap": Kind(lambda: ChainMap({"a": 1}), lambda one: one.update(a=2, b=1)),
    "order of a dict": Kind(lambda: OrderedDict(a=1, b=2), lambda one: one.move_to_end("a")),
    "Counter": Kind(lambda: Counter("ab"), lambda one: one.update("bc")),
    "keys of a dict": Kind(
        lambda: {Colour.RED: 1}, lambda one: setattr(next(iter(one)), "hits", 1), lambda one: vars(Colour.RED)
    ),
    "masked array": Kind(
        lambda: np.ma.MaskedArray([1.0, 2.0], [False, True]), lambda one: one.__setitem__(0, np.ma.masked), str
    ),
    "array": Kind(lambda: array("d", [1.0]), lambda one: one.append(2.0)),
    "memoryview": Kind(lambda: memoryview(bytearray(2)), lambda one: one.__setitem__(0, 1), bytes),
    "numpy's objects": Kind(
        lambda: np.array([[1], [2]], object), lambda one: one[0].__setitem__(0, 5), lambda one: one.tolist()
    ),
    "objects in numpy": Kind(lambda: np.array([Counter(), 1], object), lambda one: one[0].update("a"), str),
    "PCG64": Kind(lambda: np.random.PCG64(1), lambda one: one.random_raw(), lambda one: one.state),
    "MT19937": Kind(lambda: np.random.MT19937(1), lambda one: one.random_raw(3), lambda one: str(one.state)),
    "SimpleNamespace": Kind(lambda: types.SimpleNamespace(count=0), add),
    "Namespace": Kind(lambda: argparse.Namespace(count=0), add),
    "Mock": Kind(mocked, lambda one: (one(2), one.inner(3)), lambda one: (one.call_count, one.inner.mock_calls)),
    "threading.local": Kind(local, add, count_of),
    "ContextVar": Kind(lambda: set_to(3), lambda one: one.set(one.get() + 1), lambda one: one.get()),
    "ContextVar with a default": Kind(lambda: variable(default=0), lambda one: one.set(1), lambda one: one.get()),
    "WeakKeyDictionary": Kind(of_weak_keys, change_weak_keys, lambda one: (len(one[1]), one[1][one[0]])),
    "WeakValueDictionary": Kind(weak_values, lambda one: one[1].update(a=one[0]), lambda one: dict(one[1])),
    "WeakSet": Kind(lambda: [Named(), weakref.WeakSet()], lambda one: one[1].add(one[0]), lambda one: len(one[1])),
    "what is referred to weakly": Kind(
        lambda: [(one := SlotsAndMoreWeak()), weakref.ref(one)], lambda one: add(one[1]()), lambda one: one[0].count
    ),
    "slots beside a __dict__": Kind(SlotsAndMore, add_both, lambda one: (one.count, one.more)),
    "a list with slots": Kind(SlotList, append_and_set, lambda one: (list(one), hasattr(one, "count"))),
    "a member of an enumeration": Kind(
        lambda: Colour.RED, lambda one: setattr(one, "hits", 1), lambda one: hasattr(one, "hits")
    ),
    "what answers": Kind(Answers, lambda one: vars(one).update(count=1), lambda one: vars(one)["count"]),
    "what answers, with slots": Kind(slot_answers, add, count_of),
    "a bound method of Python's": Kind(lambda: [].append, lambda one: one(1), lambda one: one.__self__),
    "a view of a dict": Kind(lambda: types.MappingProxyType({"a": [1]}), lambda one: one["a"].append(2)),
    "Queue": Kind(lambda: filled(queue.Queue), take_and_put, drained),
    "LifoQueue": Kind(lambda: filled(queue.LifoQueue), take_and_put, drained),
    "PriorityQueue": Kind(lambda: filled(queue.PriorityQueue), take_and_put, drained),
    "SimpleQueue": Kind(lambda: filled(queue.SimpleQueue), take_and_put, drained),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_object_is_restored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        "commlib.snapshot.queues.runs_elsewhere", lambda: False
    )  # other threads of the tests do not matter
    kind = KINDS[name]
    value, changed, like = kind.make(), kind.make(), kind.make()
    expected = kind.seen(like)
    with run_trial([[value]], nothing):
        kind.change(value)
    assert kind.seen(value) == expected
    if "member" not in name and "keys" not in name:  # there is only one of these
        kind.change(changed)
        assert kind.seen(changed) != expected


def test_items_from_other_threads_stay_in_a_queue() -> None:
    """Changes by another thread during a trial stay."""
    one = filled(queue.Queue)
    with run_trial([one], nothing):
        assert one.get() == 3
        in_thread(one, lambda value: value.put(8))
        one.put(9)
        in_thread(one, lambda value: value.get())  # 1
    assert (one.unfinished_tasks, drained(one), vars(one).keys()) == (4, [3, 2, 8], vars(queue.Queue()).keys())


class Offset(SyntaxError):
    """Has members of Python's own."""


def test_members_of_builtin_types_are_skipped() -> None:
    """Some differ at every read, and a warning reported that they could not be restored."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run_trial([Offset("no"), np.dtype(float), sys.float_info], nothing):
            pass


def test_opaque_queues_are_skipped_while_other_threads_run() -> None:
    one, stop = filled(queue.SimpleQueue), threading.Event()
    thread = threading.Thread(target=lambda: stop.wait())  # a user's code waits
    thread.start()
    with run_trial([one], nothing):
        one.put(4)
    stop.set()
    thread.join()
    assert drained(one) == [3, 1, 2, 4]


TABLES: dict[int, int] = {}


@functools.cache
def once(key: int) -> int:
    TABLES[key] = key
    return key


@functools.lru_cache(2)
def bounded(key: int) -> int:
    TABLES[key] = key
    return key


@pytest.mark.parametrize("function", [once, bounded])
@pytest.mark.parametrize("before", [(), (1,)])
def test_cached_effects_of_a_trial_are_undone(function: Any, before: Any) -> None:
    """A cache had the trial's entry, but the trial's effects were undone: the call itself found nothing."""
    TABLES.clear()
    function.cache_clear()
    for key in before:
        function(key)
    with run_trial([function], nothing):
        function(1)
        function(2)
    assert {key: key for key in before} == TABLES
    TABLES.clear()
    function(1)
    function(2)
    assert TABLES.keys() == ({2} if before and function is once else {1, 2})  # a bounded cache drops more


def test_caches_of_methods_are_restored() -> None:
    """They are reached through their class."""

    class Once:
        def __init__(self) -> None:
            self.made: list[int] = []

        @functools.cache  # noqa: B019
        def make(self) -> None:
            self.made.append(1)

    one = Once()
    with run_trial([one], nothing):
        one.make()
    one.make()
    assert one.made == [1]


def numbers() -> Any:
    yield from range(10)


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": numbers,
    "generator expression": lambda: (one for one in range(3)),
    "iterator": lambda: iter([1, 2]),
    "of a dict": lambda: iter({1: 2}),
    "map": lambda: map(abs, [1, 2]),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "enumerate": lambda: enumerate([1, 2]),
    "count": lambda: itertools.count(),
    "reversed": lambda: reversed([1, 2]),
}


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("begun", [False, True])
def test_used_iterators_warn(name: str, begun: bool) -> None:
    """They cannot be restored: a call got a trial's rest. Only an iterator that the model holds gives a warning."""
    one = ITERATORS[name]()
    if begun and name != "of a dict":
        next(one)
    with pytest.raises(UsageError, match=r"which a trial run of the call has consumed\. Pass a list"):  # noqa: SIM117
        with run_trial([], nothing, {"arguments": (one,)}):
            next(one)
    one = ITERATORS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run_trial([one], nothing, [one]):
            pass


class Endless:
    def __init__(self) -> None:
        self.draws = numbers_of_its_own()


def numbers_of_its_own() -> Any:
    number = 0
    while True:
        number += 1
        yield number


@pytest.mark.parametrize("begun", [False, True])
def test_generators_warn(begun: bool) -> None:
    """The owner of a generator cannot see that it has advanced further than after one call."""
    one = Endless()
    one.draws.__name__ = f"numbers {begun}"
    if begun:
        next(one.draws)
    with pytest.warns(UserWarning, match=f"a generator .numbers {begun}., which cannot be"):  # noqa: SIM117
        with run_trial([one], nothing):
            next(one.draws)


def test_a_seed_that_spawns_warns() -> None:
    seed, names = np.random.SeedSequence(1), variable()
    with pytest.warns(UserWarning) as notices, run_trial([seed, names], nothing):
        seed.spawn(1)
        names.set(1)
    assert [text for one in notices for text in ("SeedSequence", "was not set") if text in str(one.message)] == [
        "SeedSequence", "was not set",
    ]  # fmt: skip


def test_a_model_that_holds_too_much_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearby objects are restored; objects behind a whole data set were not, without a warning."""
    monkeypatch.setattr("commlib.snapshot.trial_run.MOST", 100)
    near: list[int] = []
    with (
        pytest.warns(UserWarning, match="more than 100 objects"),
        run_trial([[[[1] for _ in range(200)], near]], nothing),
    ):
        near.append(1)
    assert near == []


class Replacing:
    def __init__(self) -> None:
        self.count = 0

    def call(self) -> None:
        self.__dict__ = {**self.__dict__, "count": self.count + 1}


def test_replaced_attributes_are_restored() -> None:
    one = Replacing()
    own = vars(one)
    with run_trial([one], nothing):
        one.call()
    assert one.count == 0 and vars(one) is own


def test_objects_without_readable_state_are_skipped() -> None:
    """A model that holds one failed at its first call."""
    with warnings.catch_warnings(action="error"), run_trial([random.SystemRandom()], nothing):
        pass


class Closed:
    pass


class Open:
    def call(self) -> None:
        self.__class__ = Closed  # type: ignore[assignment]


def test_a_changed_class_is_restored() -> None:
    """As in the state pattern: the call itself found the class from the trial."""
    one = Open()
    with run_trial([one], nothing):
        one.call()
    assert type(one) is Open


class Mute(random.Random):
    def getstate(self) -> Any:
        raise RuntimeError("not now")


def test_objects_that_fail_to_report_their_state_warn() -> None:
    """It was skipped silently, and drew other numbers afterwards."""
    with pytest.warns(UserWarning, match=r"does not restore a Mute: reading its state fails.*not now"):  # noqa: SIM117
        with run_trial([Mute()], nothing):
            pass


def test_a_cycle_repeats_its_whole_list() -> None:
    """Its list was emptied, so that the first elements never repeated."""
    rounds = itertools.cycle([1, 2, 3])
    assert next(rounds) == 1
    with run_trial([rounds], nothing):
        next(rounds)
    assert sorted(next(rounds) for _ in range(3)) == [1, 2, 3]
