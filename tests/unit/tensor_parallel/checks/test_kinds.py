"""Kinds of calls: values that change with every call make no new kind, values that decide control flow do."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from enum import Flag, IntEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from commlib.tensor_parallel.checks.kinds import KINDS, CallKinds, kind_of


class Given(NamedTuple):
    x: Any
    mask: Any = None


@dataclass
class Options:
    flag: bool = False
    mask: Any = None


class Making(OrderedDict[str, Any]):
    """Creates another object at each lookup."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


def _made(number: int) -> Any:
    return lambda x: x + number


def _calling(value_: Any) -> Any:
    return lambda x: value_


def itself(x: Any) -> Any:
    return x


class Methods:
    def one(self) -> None:
        """Do nothing."""

    def other(self) -> None:
        """Do nothing, too."""


class Permission(Flag):
    READ = 1
    WRITE = 2


class Colour(IntEnum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ([1, 2], [3, 4, 5]),
        ({"a": 1, "b": (2.0, None)}, {"b": (3.0, None), "a": 4}),
        (KeyError("a"), KeyError("b")),
        (["a", "b"], ["c"]),
        (Given(1), Given(2)),
        (Options(mask=1), Options(mask=2)),
        (slice(1, 2), slice(3, 4)),
        (_made(1), _made(2)),
        (b"a", b"b"),
        (Making(a=int), Making(a=int)),
        ([True, False] * 8, [False, True] * 9),
        (_made(1), _made(2)),
        (_calling(itself), _calling(itself)),
        (functools.partial(_made, 1), functools.partial(_made, 2)),
        (np.zeros(3), np.zeros(4)),
        ([3, 4], [5]),
    ],
)
def test_equivalent_calls_are_of_one_kind(one: Any, other: Any) -> None:
    assert kind_of(one) == kind_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, False),
        ("a", "b"),
        (1, 1.0),
        (1, None),
        ((1,), [1]),
        ((True,), (False,)),
        ({"a": 1}, {"b": 1}),
        ([1], [""]),
        (Colour.RED, Colour.BLUE),
        ((Colour.RED,), (1,)),
        (Permission.READ, Permission.READ | Permission.WRITE),
        (Given(1), Given(1, 2)),
        (Given(1), (1, None)),
        (Options(), Options(True)),
        (Options(), Options(mask=1)),
        (SimpleNamespace(n=False), SimpleNamespace(n=True)),
        (MappingProxyType({"n": False}), MappingProxyType({"n": True})),
        (OrderedDict(n=False), OrderedDict(n=True)),
        ({"a"}, {"b"}),
        (frozenset({"a"}), frozenset({"b"})),
        ([True], [False]),
        ([{"a": 1}], [{"a": 1, "b": 1}]),
        (slice(None), slice(0, 2)),
        (_made(1), lambda x: x),
        (int, float),
        (len, abs),
        (Making(a=int), Making(a=float)),
        (np.bool_(True), np.bool_(False)),
        (Path("a"), Path("b")),
        (_calling(len), _calling(abs)),
        (_calling(True), _calling(False)),
        (_calling(_calling(True)), _calling(_calling(False))),
        (functools.partial(_made, True), functools.partial(_made, False)),
        (functools.partial(len), functools.partial(abs)),
        (Methods().one, Methods().other),
        (lambda x, flag=True: x, lambda x, flag=False: x),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(3), np.zeros((3, 1))),
        ([None], [None, None]),
        ([True, False], [False, True]),
    ],
)
def test_different_calls_are_of_two_kinds(one: Any, other: Any) -> None:
    assert kind_of(one) != kind_of(other)


def test_functions_that_refer_to_each_other_have_a_kind() -> None:
    def first() -> Any:
        return [second, table]

    def second() -> Any:
        return first

    table = {"first": first, "again": functools.partial(first)}
    assert kind_of(first) == kind_of(first) != kind_of(second)


def test_a_framework_describes_its_own_types() -> None:
    def length(value: Any) -> int:
        return len(value)

    assert kind_of((b"ab", [b"a"], True), length) == (tuple, 2, (list, frozenset([1])), True)


def test_the_number_of_checked_kinds_is_limited() -> None:
    kinds = CallKinds()
    kinds.add("known")
    for at in range(KINDS):
        assert not kinds.too_many
        kinds.settle(at)
    assert kinds.too_many
    assert "known" in kinds
    assert KINDS not in kinds


def test_a_path_is_known_after_registration() -> None:
    kinds = CallKinds()
    kinds.add("known")
    kinds.settle("looked at", ("up", "down"))
    assert [kinds.way(kind) for kind in ("known", "looked at", "new")] == [None, ("up", "down"), None]


def test_repeated_failures_end_the_checks() -> None:
    kinds = CallKinds()
    for _ in range(2):
        kinds.miss("a kind")
        assert "a kind" not in kinds
    kinds.miss("a kind")
    assert "a kind" in kinds
    assert kinds.looks == 0
