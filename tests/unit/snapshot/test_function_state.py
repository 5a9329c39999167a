"""A trial of a function restores all state its code reaches by name. Counters counted several times for one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest

from commlib.snapshot.object_snapshot import ObjectSnapshot
from commlib.snapshot.trial_run import run_trial
from tests.unit.tensor_parallel.run import counting


def nothing(_: object) -> ObjectSnapshot | None:
    return None


class Meta(type):
    made = 0

    def __call__(cls, *args: Any) -> Any:
        Meta.made += 1
        return super().__call__(*args)


class Made(metaclass=Meta):
    """A class whose class counts."""


class Stats:
    """A class without objects."""

    calls = 0
    log: ClassVar[list[int]] = []


class Registry:
    items: ClassVar[list[int]] = []

    @staticmethod
    def add() -> None:
        Registry.items.append(1)


class Single:
    own: ClassVar[Any] = None

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    def get(cls) -> Any:
        if cls.own is None:
            cls.own = cls()
        return cls.own


class Modes:
    """Calls a method by a name that it computes."""

    log: ClassVar[list[int]] = []

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(self) -> None:
        getattr(self, f"run_{self.mode}")()

    def run_fast(self) -> None:
        counted_fast.append(1)


counted_fast: list[int] = []


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        decorated_log.append(2)
        return function(*args)

    return call


class Decorated:
    @logged
    def __call__(self) -> None:
        decorated_log.append(1)

    @property
    def hit(self) -> int:
        decorated_log.append(1)
        return 1


decorated_log: list[int] = []
decorated = Decorated()


def class_attribute() -> None:
    Stats.calls += 1
    Stats.log.append(1)
    Stats.new = 1  # type: ignore[attr-defined]


def class_as_argument(kind: Any = Stats) -> None:
    kind.calls += 1


def metaclass() -> None:
    Made()


def static() -> None:
    Registry.add()


def singleton() -> None:
    Single.get().count += 1


def module_attribute() -> None:
    counting.calls += 1
    counting.log.append(1)
    counting.Kept.calls += 1
    counting.other = 1  # type: ignore[attr-defined]


def module_function() -> None:
    counting.count()


def imported_within() -> None:
    import tests.unit.tensor_parallel.run.counting as here

    here.calls += 1


def imported_from() -> None:
    from tests.unit.tensor_parallel.run.counting import count

    count()


def text_of_a_name() -> None:
    getattr(counting, "count")()  # noqa: B009


def by_globals() -> None:
    counting.by_name()


def behind_a_property() -> None:
    decorated.hit  # noqa: B018
    decorated()


FUNCTIONS: list[Any] = [
    class_attribute, class_as_argument, metaclass, static, singleton, module_attribute, module_function,
    imported_within, imported_from, text_of_a_name, by_globals, behind_a_property, Modes("fast"),
]  # fmt: skip


def seen() -> str:
    single = None if Single.own is None else Single.own.count
    own = (Stats.calls, Stats.log, hasattr(Stats, "new"), Registry.items, Meta.made, single, counted_fast)
    return f"{own} {decorated_log} {counting.seen()}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: getattr(one, "__name__", type(one).__name__))
@pytest.mark.parametrize("single", [False, True], ids=["", "again"])
def test_changes_of_a_function_are_restored(function: Callable[[], None], single: bool) -> None:
    if single:
        function()
    before = seen()
    with run_trial([function], nothing):
        function()
        assert seen() != before
    assert seen() == before


def package() -> None:
    a_package.module = a_module  # type: ignore[attr-defined]  # as Python does when one is imported
    a_package.number = 1  # type: ignore[attr-defined]


a_package, a_module = ModuleType("a_package"), ModuleType("a_package.module")


def test_modules_imported_by_a_trial_stay_imported() -> None:
    """Python stores them in their package only once."""
    with run_trial([package], nothing):
        package()
    assert a_package.module is a_module
    assert not hasattr(a_package, "number")


def test_state_of_pytest_is_not_restored(request: pytest.FixtureRequest) -> None:
    """An assert refers to pytest's globals, and so to its whole session, which was restored."""

    def asserting() -> None:
        assert Stats.calls >= 0

    with run_trial([asserting], nothing):
        request.node.user_properties.append(("looks", 1))
    assert request.node.user_properties.pop() == ("looks", 1)
