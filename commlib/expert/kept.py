"""Kept: what layers have beside weights that may go into what they compute, as tables of random features do. [pure]

Arrays, and numbers in lists, dicts and objects. A single number or text of a layer may say which rank this is, or what
it prints: of those see `commlib.comparison.likeness`.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from commlib.comparison.agreement import digest_of
from commlib.comparison.parameter_check import Gathers
from commlib.snapshot.contents import attributes_of, content_of, elements_of, items_of
from commlib.snapshot.reached import is_users_kind

_MOST = 100_000
"""Objects that are looked at."""
_NUMBERS = (int, float, complex)
_WITH_FRACTIONS = (float, complex, np.inexact)


class Told(NamedTuple):
    """What ranks compare of a value: what it is, what tells it from others, and whether it can be written in place."""

    kind: str
    digest: str
    takes_values: bool = False


class Search:
    """Finds what layers keep, each value once.

    is_array: whether a value is an array or a tensor. known: what is not looked at, as it is looked at elsewhere.
    layer: returns the attributes of a layer of the framework, None for what is none.
    """

    def __init__(
        self,
        is_array: Callable[[Any], bool],
        known: Iterable[Any] = (),
        layer: Callable[[Any], Mapping[str, Any] | None] = lambda _: None,
    ) -> None:
        self._is_array, self._layer = is_array, layer
        self._known = {id(one): one for one in known}

    def kept(self, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arrays, lists of numbers, and numbers within others, that can be reached, by where they stand."""
        waiting = [(name, value, False) for name, value in reversed(list(attributes.items()))]
        while waiting and len(self._known) < _MOST:
            name, value, is_within = waiting.pop()
            if isinstance(value, _WITH_FRACTIONS) and (is_within or isinstance(value, np.inexact)):
                yield name, value
            if value is None or isinstance(value, (str, bytes, type, np.generic, *_NUMBERS)):
                continue
            if id(value) in self._known:
                continue
            self._known[id(value)] = value
            if self._is_array(value) or is_numbers(value):
                yield name, value
                continue
            inside = self._layer(value)
            inner = inside_of(value) if inside is None else {f".{key}": one for key, one in inside.items()}
            waiting += [(f"{name}{place}", one, True) for place, one in reversed(list(inner.items()))]


def of_classes(layer: Any) -> dict[str, Any]:
    """Return what the user's classes of a layer have, but for what they define."""
    return {
        f"{kind.__qualname__}.{name}": value
        for kind in type(layer).__mro__
        if is_users_kind(kind)
        for name, value in vars(kind).items()
        if not (isinstance(value, FunctionType | property | staticmethod | classmethod) or name.startswith("__"))
    }


def is_numbers(value: Any) -> bool:
    """Return whether a value is numbers one after another: one with a fraction, or two, which say no rank."""
    if isinstance(value, array):
        return True
    if not isinstance(value, list | tuple | deque | UserList):
        return False
    each = elements_of(value.data if isinstance(value, UserList) else value)
    if not all(isinstance(one, (*_NUMBERS, np.number)) and not isinstance(one, bool) for one in each):
        return False
    return len(each) > 1 or any(isinstance(one, _WITH_FRACTIONS) for one in each)


def inside_of(value: Any) -> dict[str, Any]:
    """Return what containers, functions, and objects of users' classes have, by how it is written behind a name."""
    if isinstance(value, dict):
        return {f"[{key!r}]": one for key, one in items_of(value)}
    if isinstance(value, UserDict | ChainMap | weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        return {f"[{_said(key)}]": one for key, one in list(value.items())}
    if isinstance(value, list | tuple | deque):
        return {f"[{place}]": one for place, one in enumerate(elements_of(value))}
    if isinstance(value, UserList):
        return {f"[{place}]": one for place, one in enumerate(value.data)}
    if isinstance(value, MethodType):
        return {".__self__": value.__self__, ".__func__": value.__func__}
    if isinstance(value, functools.partial):
        return {".func": value.func, **inside_of(value.args), **inside_of(value.keywords)}
    if isinstance(value, FunctionType):
        return _of_function(value) if is_users_kind(value) else {}
    return {f".{name}": one for name, one in _of_users(value).items()}


def _of_function(function: FunctionType) -> dict[str, Any]:
    """Return what a function has closed over, and its defaults."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {f".{name}": content_of(cell) for name, cell in cells}
    return {**closed, **inside_of(function.__defaults__ or ()), **inside_of(function.__kwdefaults__ or {})}


def _of_users(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class; of others none."""
    if isinstance(value, type) or not (is_users_kind(type(value)) or isinstance(value, SimpleNamespace)):
        return {}
    return {name: one for name, one in attributes_of(value) if not name.startswith("__")}


def _said(key: Any) -> str:
    text = repr(key)
    return type(key).__qualname__ if " at 0x" in text else text


def told_numbers(value: Any) -> Told:
    """Return what ranks compare of numbers."""
    if isinstance(value, (*_NUMBERS, np.generic)):
        return Told(repr(value), "")
    each = list(value)
    few = f"{type(value).__name__} of {len(each)}: {', '.join(map(repr, each[:4]))}{', ...' if len(each) > 4 else ''}"
    return Told(few, f"{digest_of(list(map(repr, each))):x}")


def to_take(comm: Gathers, what: str, own: Mapping[str, Told]) -> list[str]:
    """Return the names of values that differ between ranks, and can be given those of rank 0. Collective.

    Rank 0 warns of the first that differs and cannot.
    """
    if comm.size == 1 or len(set(comm.all_gather_object(digest_of([f"{own}"])))) == 1:
        return []
    everyone: list[dict[str, Told]] = comm.all_gather_object(dict(own))
    names = list(dict.fromkeys(name for one in everyone for name in one))
    apart = [name for name in names if len({one.get(name) for one in everyone}) > 1]
    taken = [
        name
        for name in apart
        if len({one[name].kind if name in one else None for one in everyone}) == 1
        and all(one[name].takes_values for one in everyone)
    ]
    left = [name for name in apart if name not in taken]
    if left and comm.rank == 0:
        name = left[0]
        rank = next(rank for rank, one in enumerate(everyone) if one.get(name) != everyone[0].get(name))
        here, there = (one[name].kind if name in one else "nothing" for one in (everyone[0], everyone[rank]))
        differs = f"is {here} on rank 0 and {there} on rank {rank} of {comm.size}"
        if here == there:
            differs = f"({here}) has other values on rank 0 than on rank {rank} of {comm.size}"
        more = f" (and {len(left) - 1} others like it)" if len(left) > 1 else ""
        warnings.warn(
            f"{what}: {name} {differs}{more}: if what the model computes goes by it, ranks hold different models: give "
            "all the same, by one seed, or let it be a weight, which gets the values of rank 0",
            stacklevel=3,
        )
    return taken
