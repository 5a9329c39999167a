"""Values of layers other than weights that may affect their results, such as tables of random features. [pure]

These are arrays, and numbers in lists, dicts and objects. A single number or text of a layer may be its rank or a text
that it prints; `commlib.comparison.model_signature` handles those.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from commlib.comparison.agreement import digest_of
from commlib.comparison.parameter_check import GatherRanks
from commlib.snapshot.contents import attributes_of, content_of, elements_of, items_of
from commlib.snapshot.reachable_code import is_users_kind

_MOST = 100_000
"""Maximum number of objects visited."""
_NUMBERS = (int, float, complex)
_WITH_FRACTIONS = (float, complex, np.inexact)


class ValueDigest(NamedTuple):
    """A value as ranks compare it: a description, a digest of its contents, and whether it can be written in place."""

    kind: str
    digest: str
    is_writable: bool = False


def digest_array(value: np.ndarray[Any, Any]) -> ValueDigest:
    """Return the digest of an array; objects are compared as text."""
    contents = repr(value.tolist()).encode() if value.dtype.kind == "O" else value.tobytes()
    is_writable = value.flags.writeable and value.dtype.kind in "biufc"
    return ValueDigest(f"array {value.dtype}{list(value.shape)}", sha256(contents).hexdigest()[:16], is_writable)


class ValueSearch:
    """Finds the values that layers keep, each value once.

    is_array: whether a value is an array or a tensor. known: values to skip, because others compare them. layer:
    returns the attributes of a layer of the framework, None for other objects.
    """

    def __init__(
        self,
        is_array: Callable[[Any], bool],
        known: Iterable[Any] = (),
        layer: Callable[[Any], Mapping[str, Any] | None] = lambda _: None,
    ) -> None:
        self._is_array, self._layer = is_array, layer
        self._known = {id(one): one for one in known}

    def find(self, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield each reachable array and list of numbers, and each number inside another value, with its path."""
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
            inner = list_contents(value) if inside is None else {f".{key}": one for key, one in inside.items()}
            waiting += [(f"{name}{place}", one, True) for place, one in reversed(list(inner.items()))]


def class_values(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer's user-defined classes, except methods and other definitions."""
    return {
        f"{kind.__qualname__}.{name}": value
        for kind in type(layer).__mro__
        if is_users_kind(kind)
        for name, value in vars(kind).items()
        if not (isinstance(value, FunctionType | property | staticmethod | classmethod) or name.startswith("__"))
    }


def is_numbers(value: Any) -> bool:
    """Return whether a value is a sequence of numbers that is no rank: one with a fraction, or at least two."""
    if isinstance(value, array):
        return True
    if not isinstance(value, list | tuple | deque | UserList):
        return False
    each = elements_of(value.data if isinstance(value, UserList) else value)
    if not all(isinstance(one, (*_NUMBERS, np.number)) and not isinstance(one, bool) for one in each):
        return False
    return len(each) > 1 or any(isinstance(one, _WITH_FRACTIONS) for one in each)


def list_contents(value: Any) -> dict[str, Any]:
    """Return the contents of containers, functions, and objects of users' classes, by the suffix that reaches each."""
    if isinstance(value, dict):
        return {f"[{key!r}]": one for key, one in items_of(value)}
    if isinstance(value, UserDict | ChainMap | weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
        return {f"[{_describe_key(key)}]": one for key, one in list(value.items())}
    if isinstance(value, list | tuple | deque):
        return {f"[{place}]": one for place, one in enumerate(elements_of(value))}
    if isinstance(value, UserList):
        return {f"[{place}]": one for place, one in enumerate(value.data)}
    if isinstance(value, MethodType):
        return {".__self__": value.__self__, ".__func__": value.__func__}
    if isinstance(value, functools.partial):
        return {".func": value.func, **list_contents(value.args), **list_contents(value.keywords)}
    if isinstance(value, FunctionType):
        return _function_contents(value) if is_users_kind(value) else {}
    return {f".{name}": one for name, one in _user_attributes(value).items()}


def _function_contents(function: FunctionType) -> dict[str, Any]:
    """Return the closed-over values and defaults of a function."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {f".{name}": content_of(cell) for name, cell in cells}
    return {**closed, **list_contents(function.__defaults__ or ()), **list_contents(function.__kwdefaults__ or {})}


def _user_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a user's class; of others none."""
    if isinstance(value, type) or not (is_users_kind(type(value)) or isinstance(value, SimpleNamespace)):
        return {}
    return {name: one for name, one in attributes_of(value) if not name.startswith("__")}


def _describe_key(key: Any) -> str:
    text = repr(key)
    return type(key).__qualname__ if " at 0x" in text else text


def digest_numbers(value: Any) -> ValueDigest:
    """Return numbers as ranks compare them."""
    if isinstance(value, (*_NUMBERS, np.generic)):
        return ValueDigest(repr(value), "")
    each = list(value)
    few = f"{type(value).__name__} of {len(each)}: {', '.join(map(repr, each[:4]))}{', ...' if len(each) > 4 else ''}"
    return ValueDigest(few, f"{digest_of(list(map(repr, each))):x}")


def find_replaceable(comm: GatherRanks, what: str, own: Mapping[str, ValueDigest]) -> list[str]:
    """Return the names of values that differ between ranks, and can take those of rank 0. Collective.

    Rank 0 warns of the first value that differs and cannot be overwritten.
    """
    if comm.size == 1 or len(set(comm.all_gather_object(digest_of([f"{own}"])))) == 1:
        return []
    everyone: list[dict[str, ValueDigest]] = comm.all_gather_object(dict(own))
    names = list(dict.fromkeys(name for one in everyone for name in one))
    differing = [name for name in names if len({one.get(name) for one in everyone}) > 1]
    replaceable = [
        name
        for name in differing
        if len({one[name].kind if name in one else None for one in everyone}) == 1
        and all(one[name].is_writable for one in everyone)
    ]
    left = [name for name in differing if name not in replaceable]
    if left and comm.rank == 0:
        name = left[0]
        rank = next(rank for rank, one in enumerate(everyone) if one.get(name) != everyone[0].get(name))
        here, there = (one[name].kind if name in one else "nothing" for one in (everyone[0], everyone[rank]))
        differs = f"is {here} on rank 0 and {there} on rank {rank} of {comm.size}"
        if here == there:
            differs = f"({here}) has different values on rank 0 and on rank {rank} of {comm.size}"
        more = f" (and {len(left) - 1} others like it)" if len(left) > 1 else ""
        warnings.warn(
            f"{what}: {name} {differs}{more}. If the model's results depend on it, ranks hold different models. Give "
            "it the same value on all ranks, e.g. with one seed, or make it a weight, which is broadcast from rank 0",
            stacklevel=3,
        )
    return replaceable
