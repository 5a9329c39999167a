"""A trial of a user's model: all its state is restored, in place."""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, deque
from typing import Any, ClassVar

import numpy as np
import pytest

from commlib.snapshot.trial_run import MOST, ObjectSnapshot, run_trial

calls: list[int] = []
total = 0


class Keeps:
    """State of every kind that a model may hold."""

    def __init__(self) -> None:
        self.count, self.list, self.dict, self.set = 0, [1], {"a": [1]}, {1}
        self.ordered, self.counter, self.deque = OrderedDict(a=1, b=2), Counter("ab"), deque([1, 2], 3)
        self.array, self.numbers, self.own = np.zeros(3), np.random.default_rng(1), random.Random(2)
        self.inner: Any = None

    def __call__(self) -> None:
        global total
        self.count += 1
        self.list.append(2)
        self.dict["a"].append(2)
        self.dict["b"] = [3]
        self.set.add(2)
        self.ordered.pop("a", None)
        self.counter["a"] += 1
        self.deque.extend([3, 4])
        self.array += 1
        self.new = self.numbers.random() + self.own.random() + random.random() + np.random.rand()
        calls.append(1)
        total += 1

    def seen(self) -> str:
        parts = {name: value for name, value in vars(self).items() if name not in ("numbers", "own", "inner")}
        return f"{parts} {self.numbers.bit_generator.state} {self.own.getstate()} {calls} {total}"


def nothing(_: object) -> ObjectSnapshot | None:
    return None


def test_all_state_is_restored() -> None:
    """Counters were one too high after a check, caches had an entry more, and random numbers were others."""
    keeps, outer = Keeps(), Keeps()
    outer.inner = functools.partial(lambda kept: kept(), keeps)
    number = 0

    def hook() -> None:
        nonlocal number
        number += 1
        keeps()

    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    before, ordered = keeps.seen(), list(keeps.ordered)
    same = keeps.list, keeps.dict, keeps.array
    with run_trial([outer, [hook]], nothing):
        hook()
        outer.inner()
        assert number == 1 and keeps.count == 2 and len(calls) == 2
    assert (number, before, ordered) == (0, keeps.seen(), list(keeps.ordered))
    assert all(one is other for one, other in zip(same, (keeps.list, keeps.dict, keeps.array), strict=True))
    assert (random.random(), np.random.rand()) == expected


class Table(dict[str, Any]):
    """Counts missing keys, in an attribute of its own."""

    misses = 0

    def __missing__(self, name: str) -> int:
        self.misses += 1
        return 0


class Slotted:
    __slots__ = ("count", "list", "unset")
    unset: int

    def __init__(self) -> None:
        self.count, self.list = 0, [1]


class Elsewhere:
    """Stores its counts everywhere except in itself."""

    made = 0
    log: ClassVar[list[int]] = []
    table, slotted, bytes = Table(), Slotted(), bytearray(b"ab")

    def __call__(self) -> None:
        type(self).made += 1
        self._counted()

    def _counted(self) -> None:
        self.log.append(1)
        self.table["a"]
        self.slotted.count += 1
        self.slotted.list.append(2)
        self.slotted.unset = 1
        self.bytes += b"c"
        named()
        self.again()

    @staticmethod
    def again() -> None:
        global _first
        _first = "now"
        first_named.extend(one for one in [*first_named, 1])

    def seen(self) -> str:
        slots = self.slotted.count, self.slotted.list, hasattr(self.slotted, "unset")
        state = self.made, self.log, self.table.misses, slots, self.bytes
        return f"{state} {vars(named)} {named.__defaults__} {named.__kwdefaults__} {first_named} {_first}"


first_named: deque[int] = deque()
_first: str | None = None


def named(default: list[int] = [], *, last: int = 0) -> None:  # noqa: B006
    named.calls = getattr(named, "calls", 0) + 1  # type: ignore[attr-defined]
    default.append(1)
    named.__kwdefaults__ = {"last": last + 1}
    deeper()


def deeper() -> None:
    first_named.append(2)


def test_counts_stored_elsewhere_are_restored() -> None:
    """Counts in attributes of classes, functions and containers, and in variables of other functions, were doubled."""
    one = Elsewhere()
    before = one.seen()
    with run_trial([one], nothing):
        one()
        assert one.seen() != before
    assert one.seen() == before
    one()
    assert one.made == 1 and one.table.misses == 1 and vars(named)["calls"] == 1


def test_a_failed_trial_is_restored() -> None:
    keeps = Keeps()
    before = keeps.seen()
    try:
        with run_trial([keeps], nothing):
            keeps()
            raise KeyError
    except KeyError:
        pass
    assert keeps.seen() == before


def first() -> int:
    first.__code__ = second.__code__
    return 1


def second() -> int:
    return 2


def test_functions_that_change_themselves_are_restored() -> None:
    """A cell that was empty stayed full, and a function ran other code: outputs were others from the first call on."""
    if random.random() > 1:
        count = 0

    def counted() -> int:
        nonlocal count
        try:
            count += 1
        except NameError:
            count = 1
        return count

    with run_trial([counted, first], nothing):
        assert (counted(), counted(), first(), first()) == (1, 2, 1, 2)
    assert (counted(), first()) == (1, 1)


def test_arguments_of_a_model_with_a_data_set_are_restored() -> None:
    """Objects behind 100,000 others are skipped; arguments were last, and a list was empty in the call itself."""
    rows = [[row] for row in range(MOST)]
    keeps, arguments = [1, rows], [2]
    with pytest.warns(UserWarning, match=f"the model keeps more than {MOST} objects"):  # noqa: SIM117
        with run_trial([keeps], nothing, ([arguments],)):
            arguments.pop()
            keeps.pop(0)
            rows[0].pop()
    assert (keeps[0], arguments, rows[0]) == (1, [2], [0])


def test_a_model_held_by_an_argument_with_a_data_set_is_restored() -> None:
    """The model's state was beyond the limit, since it had been reached through the arguments."""
    keeps, shared = Keeps(), {"a": [1]}
    keeps.inner = shared
    given = [[[row] for row in range(MOST)], keeps, shared]
    before = keeps.seen()
    with run_trial([keeps], nothing, (given,)):
        keeps()
        shared["a"].append(2)
    assert (keeps.seen(), shared) == (before, {"a": [1]})


class Making(OrderedDict[str, Any]):
    """Creates an object at each lookup."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()

    def items(self) -> Any:
        raise AssertionError("nobody asks")


def test_tables_that_create_objects_are_not_changed() -> None:
    """They had objects in place of classes, in the whole process."""
    table = Making(a=dict, b=list)
    with run_trial([table], nothing):
        table["c"] = set
    assert OrderedDict.__getitem__(table, "a") is dict
    assert list(table) == ["a", "b"]
