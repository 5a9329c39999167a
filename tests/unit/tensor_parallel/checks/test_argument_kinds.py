"""Descriptions of arguments: values that may decide control flow, but not values new in each call, nor everything."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import itertools
import logging
import operator
import threading
import time
import typing
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commlib.tensor_parallel.checks.kinds import CallKinds, ObjectContents, SameObject, kind_of


def compose(*functions: Any) -> Any:
    def run(x: Any) -> Any:
        return functools.reduce(lambda x, one: one(x), functions, x)

    return run


def holding(value: Any) -> Any:
    return lambda: value


def decorated(function: Any, times: int = 3) -> Any:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return functools.wraps(function)(wrapper if times == 1 else decorated(wrapper, times - 1))


def with_attribute(value: Any) -> Any:
    def function() -> Any:
        return function.goes  # type: ignore[attr-defined]

    function.goes = value  # type: ignore[attr-defined]
    return function


class Base:
    goes = False

    @classmethod
    def run(cls) -> bool:
        return cls.goes


class Derived(Base):
    goes = True


class Goes:
    """An object controlled by its attributes, like a configuration, a cache or a callable object."""

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)

    def run(self) -> None:
        """Do nothing."""


class Slots:
    __slots__ = ("_goes", "more")

    def __init__(self, goes: Any) -> None:
        self._goes = goes


class Named(str):
    __slots__ = ()


class Table(dict[str, Any]):
    """A table with attributes."""


class Asked:
    """Has methods that are costly or have side effects."""

    def __init__(self) -> None:
        self.own, self.asked = 1, 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError


def itself(table: Any, put: Callable[[Any, Any], Any]) -> Any:
    put(table, table)
    return table


def shout(x: str) -> str:
    return x.upper()


def whisper(x: str) -> str:
    return x.lower()


TWO: dict[str, tuple[Any, Any]] = {
    "composed": (compose(shout, len), compose(shout, sum)),
    "composed of more": (compose(shout), compose(shout, len)),
    "closure over a list": (holding([shout]), holding([whisper])),
    "closure over a dict": (holding({"act": shout}), holding({"act": whisper})),
    "closure over flags": (holding({"flag": True}), holding({"flag": False})),
    "closure over an object": (holding(Goes(flag=True)), holding(Goes(flag=False))),
    "default that is a dict": (lambda c={"a": True}: c, lambda c={"a": False}: c),
    "decorated": (decorated(shout), decorated(whisper)),
    "decorated often": (decorated(shout, 9), decorated(whisper, 9)),
    "attribute of a function": (with_attribute(True), with_attribute(False)),
    "class of a method": (Base.run, Derived.run),
    "object of a method": (Goes(flag=True).run, Goes(flag=False).run),
    "method of a type": (str.upper, str.lower),
    "method of a string": ("a".upper, "a".lower),
    "method of a table": ({"a": 1}.get, {"b": 1}.get),
    "methodcaller": (operator.methodcaller("upper"), operator.methodcaller("lower")),
    "methodcaller with a flag": (operator.methodcaller("a", up=True), operator.methodcaller("a", up=False)),
    "attrgetter": (operator.attrgetter("a"), operator.attrgetter("b")),
    "function of numpy": (np.exp, np.tanh),
    "cached": (functools.cache(shout), functools.cache(whisper)),
    "partial of functions": (functools.partial(map, (shout,)), functools.partial(map, (whisper,))),
    "string of numpy": (np.str_("a"), np.str_("b")),
    "string of one's own": (Named("a"), Named("b")),
    "flags": ([True], [True, True]),
    "keys of a table": (UserDict(a=1), UserDict(a=1, b=1)),
    "values of a table": (UserDict(a="x"), UserDict(a="y")),
    "tables": (ChainMap({"a": 1}), ChainMap({"b": 1})),
    "how many": (deque([None]), deque([None, None])),
    "whether several": (UserList([None]), UserList([None, None])),
    "object": (Goes(flag=True), Goes(flag=False)),
    "object within": (Goes(own=Goes(how="a")), Goes(own=Goes(how="b"))),
    "function of an object": (Goes(act=shout), Goes(act=whisper)),
    "slots": (Slots(True), Slots(False)),
    "options": (argparse.Namespace(a=True), argparse.Namespace(a=False)),
    "attributes of a table": (Table(a=1), itself(Table(a=1), lambda one, _: setattr(one, "flag", True))),
    "dtype": (np.dtype("f4"), np.dtype("f8")),
    "generic": (typing.List[int], typing.List[str]),  # noqa: UP006
    "generic of a class": (list[int], list[str]),
    "one of several": (int | str, int | None),
    "module": (operator, functools),
    "class that is referred to": (weakref.ref(Base), weakref.ref(Derived)),
    "first of many": ((True, *[1] * 2000), (1,) * 2001),
}

ONE: dict[str, tuple[Any, Any]] = {
    "numbers of an object": (Goes(step=1, rate=0.1), Goes(step=2, rate=0.2)),
    "order of attributes": (Goes(a=1, b=True), Goes(b=True, a=2)),
    "history of an object": (Goes(losses=[1.0]), Goes(losses=[1.0, 2.0, 3.0])),
    "history of an object that begins": (Goes(losses=[]), Goes(losses=[1.0])),
    "history of tables": (Goes(logs=[{"loss": 1.0}] * 2), Goes(logs=[{"loss": 1.0}] * 12)),
    "texts of an object": (Goes(texts=["a", "b"]), Goes(texts=["c"])),
    "table of numbers of an object": (Goes(seen={1: 2}), Goes(seen={3: 4})),
    "closure over a history": (holding([1.0]), holding([1.0, 2.0])),
    "arrays of a batch": (Goes(x=np.zeros((2, 3))), Goes(x=np.zeros((4, 5)))),
    "cache with as many layers": (Goes(layers=[np.zeros(2)] * 3), Goes(layers=[np.zeros(3)] * 4)),
    "many numbers": ([1] * 3000, [2] * 4000),
    "many words": ({f"a{at}": at for at in range(2000)}, {f"b{at}": at for at in range(3000)}),
    "many flags": ([True, False] * 2000, [False, True] * 3000),
    "generators": ((at for at in "ab"), (at for at in "cd")),
    "loggers": (logging.getLogger("a"), logging.getLogger("a.b")),
    "locks": (Goes(lock=threading.Lock()), Goes(lock=threading.Lock())),
    "iterators": (itertools.count(1), itertools.count(2)),
    "read-only": (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
}


@pytest.mark.parametrize("name", TWO)
def test_different_values_are_of_two_kinds(name: str) -> None:
    one, other = TWO[name]
    assert kind_of(one) != kind_of(other)
    assert kind_of(one) == kind_of(one)
    assert hash(kind_of(one)) == hash(kind_of(one))


@pytest.mark.parametrize("name", ONE)
def test_equivalent_values_are_of_one_kind(name: str) -> None:
    one, other = ONE[name]
    assert kind_of(one) == kind_of(other)


def test_users_methods_are_not_called() -> None:
    one = Asked()
    assert kind_of(one) == kind_of(Asked())
    assert vars(one) == {"own": 1, "asked": 0}


@dataclass
class Node:
    value: Any
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def tree(value: Any) -> Node:
    root = Node(1)
    root.children.append(Node(value, root))
    return root


RECURSIVE: dict[str, Callable[[Any], Any]] = {
    "tree": tree,
    "namespace": lambda value: itself(SimpleNamespace(a=value), lambda one, me: setattr(one, "me", me)),
    "dict": lambda value: itself({"a": value}, lambda one, me: one.update(me=me)),
    "list": lambda value: itself([value, ""], lambda one, me: one.append(me)),
    "deque": lambda value: itself(deque([value, ""]), lambda one, me: one.append(me)),
    "object": lambda value: itself(Goes(a=value), lambda one, me: setattr(one, "me", me)),
    "proxy": lambda value: itself({"a": value}, lambda one, me: one.update(me=MappingProxyType(me))),
}


@pytest.mark.parametrize("name", RECURSIVE)
def test_recursive_values_have_a_kind(name: str) -> None:
    """It was a RecursionError."""
    recursive = RECURSIVE[name]
    assert kind_of(recursive(True)) == kind_of(recursive(True)) != kind_of(recursive(False))


def test_deep_values_have_a_kind() -> None:
    def deep(value: Any) -> Any:
        for _ in range(2000):
            value = [value]
        return value

    assert kind_of(deep(1)) == kind_of(deep(2))


def test_unhashable_classes_have_a_kind() -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            return type.__eq__(cls, other)

    class One(metaclass=Meta):
        pass

    class Other(metaclass=Meta):
        pass

    assert kind_of(One) == kind_of(One) != kind_of(Other)
    assert kind_of(One()) == kind_of(One()) != kind_of(Other())
    assert kind_of([One(), {"a": One()}]) == kind_of([One(), {"a": One()}])


def much(flag: bool = False) -> Goes:
    return Goes(nodes=[[Goes(at=at, flag=flag) for at in range(100)] for _ in range(100)])


def test_large_values_are_compared_by_identity() -> None:
    one, other = much(), much(True)
    assert kind_of(one) == kind_of(one) != kind_of(other)


def test_a_replaced_object_is_a_different_one() -> None:
    kinds = set()
    for _ in range(20):
        one = Goes()
        kinds.add(SameObject(one))
        assert SameObject(one) in kinds
        del one
        gc.collect()
    assert len(kinds) == 20


def test_kinds_hold_no_references() -> None:
    object_ = Goes()
    values = [
        holding(object_),
        object_.run,
        {"a": object_},
        [object_],
        weakref.ref(object_),
        functools.partial(object_.run),
        {object_: 1},
    ]
    kinds, reference = [kind_of(value) for value in values], weakref.ref(object_)
    del object_, values
    gc.collect()
    assert reference() is None
    assert len(kinds) == 7


@pytest.mark.parametrize(
    "value",
    [list(range(300_000)), ["a"] * 300_000, dict.fromkeys(range(300_000)), set(range(300_000)), (1,) * 300_000, much()],
    ids=["ints", "strings", "dict", "set", "tuple", "object"],
)
def test_long_values_are_cheap(value: Any) -> None:
    def timed() -> float:
        began = time.process_time()
        kind_of(value)
        return time.process_time() - began

    assert min(timed() for _ in range(5)) < 0.02


def test_a_framework_describes_larger_values() -> None:
    class Traced:
        def __init__(self, function: Any) -> None:
            self.function, self.calls = function, [None] * 3

    def told(value: Any) -> Any:
        return ObjectContents(Traced, (value.function,)) if type(value) is Traced else None

    assert kind_of(Traced(shout), told) == (Traced, kind_of(shout))
    assert kind_of([Traced(shout)], told) != kind_of([Traced(whisper)], told)
    recursive = Traced(None)
    recursive.function = holding(recursive)
    assert kind_of(recursive, told) == kind_of(recursive, told)


def test_known_kinds_survive_a_copy_of_the_model() -> None:
    kinds = CallKinds()
    kind = kind_of([shout, Goes().run, np.exp]), SameObject(shout)
    kinds.settle(kind)
    copied = copy.deepcopy(kinds)
    assert kind in copied
    copied.settle("new")
    assert "new" not in kinds
    assert (kinds.looks, copied.looks) == (1, 2)


@dataclass
class History:
    losses: list[Any] = field(default_factory=list)
    is_kept: bool = False


def test_a_history_in_a_dataclass_is_of_one_kind() -> None:
    """Each length was a separate kind, until there were too many."""
    arrays = [np.zeros(2) for _ in range(4)]
    kinds = {kind_of(History(arrays[:length])) for length in (2, 3, 4)}
    assert len(kinds) == 1
    assert kind_of(History(arrays, True)) not in kinds
    assert kind_of(History(arrays[:1])) not in kinds


def test_batches_of_texts_are_of_one_kind() -> None:
    """Each step was of a kind of its own."""
    assert kind_of(("a cat", "a dog")) == kind_of(("a bird", "two dogs"))
    assert kind_of(("a",)) != kind_of(("b",))
    assert kind_of(("a", True)) != kind_of(("b", True))


def test_dicts_of_different_classes_differ() -> None:
    one = {"a": 1.0, "b": True}
    assert kind_of(one) != kind_of(collections.OrderedDict(one))
    assert kind_of(one) == kind_of({"b": True, "a": 1.0})
