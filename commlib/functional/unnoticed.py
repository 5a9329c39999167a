"""Unnoticed: run a user's model once more, and leave counters, lists, caches and random numbers as they were."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from commlib.functional.contents import elements_of, items_of, own_method

_MOST = 100_000
"""Objects that are looked at. A model that keeps more, such as a whole data set, is not followed further."""
_MOST_BYTES = 2**28
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)
_NOT_ENTERED = frozenset(("commlib", "commlib_torch", "commlib_tensorflow", "torch", "tensorflow", "keras", "mpi4py"))
"""Packages whose objects are left alone, but what `hold` knows of them."""


@dataclass(frozen=True, slots=True)
class Held:
    """What puts an object of a framework back, and the objects that are kept by it."""

    restore: Callable[[], object] | None = None
    inside: Iterable[Any] = ()


@contextmanager
def unnoticed(roots: Iterable[Any], hold: Callable[[Any], Held | None]) -> Iterator[None]:
    """Leave what can be reached from `roots` as it is, in place, and the random numbers of Python and numpy.

    That is: lists, dicts, sets, arrays, attributes of objects, generators of random numbers, what functions have closed
    over, and the variables of modules that they name. hold: knows objects of a framework; None for all others.
    """
    seen = _Seen(hold)
    for root in roots:
        seen.look(root)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for restore in seen.restores:
            restore()
        random.setstate(python)
        np.random.set_state(numpy)


class _Seen:
    def __init__(self, hold: Callable[[Any], Held | None]) -> None:
        self._hold = hold
        self._known: dict[int, Any] = {}
        self.restores: list[Callable[[], object]] = []

    def look(self, root: Any) -> None:
        """Note all that can be reached from an object."""
        waiting = [root]
        while waiting and len(self._known) < _MOST:
            value = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            held = self._hold(value) or self._held(value)
            if held.restore is not None:
                self.restores.append(held.restore)
            waiting += held.inside

    def _held(self, value: Any) -> Held:
        if isinstance(value, dict):
            before = dict(items_of(value))
            return Held(functools.partial(_put_back_dict, value, before), list(before.values()))
        if isinstance(value, list | deque):
            return Held(functools.partial(_put_back_list, value, elements_of(value)), elements_of(value))
        if isinstance(value, set):
            return Held(functools.partial(_put_back_set, value, set(elements_of(value))), ())
        if isinstance(value, tuple | frozenset):
            return Held(None, elements_of(value))
        if isinstance(value, np.ndarray):
            return Held(_array(value))
        if isinstance(value, np.random.Generator):
            return Held(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return Held(functools.partial(value.set_state, value.get_state()))
        if isinstance(value, random.Random):
            return Held(functools.partial(value.setstate, value.getstate()))
        if isinstance(value, FunctionType):
            return _function(value)
        if isinstance(value, MethodType):
            return Held(None, (value.__self__, value.__func__))
        if isinstance(value, functools.partial):
            return Held(None, (value.func, value.args, value.keywords))
        return attributes(value) if hasattr(value, "__dict__") and is_users(value) else Held()


def is_users(value: Any) -> bool:
    """Return whether an object is the user's, or of a library of models, and not of Python, a framework or commlib."""
    package = type(value).__module__.partition(".")[0]
    library = package in _NOT_ENTERED or package in sys.stdlib_module_names
    return not library or isinstance(value, SimpleNamespace) or package == "__main__"


def attributes(value: Any) -> Held:
    """Return what puts the attributes of an object back."""
    own = vars(value)
    called = vars(type(value)).get("__call__")
    return Held(functools.partial(_put_back_dict, own, dict(own)), [*own.values(), called])


def _function(function: FunctionType) -> Held:
    """Hold what a function has closed over, and the variables of its module that it names."""
    if function.__module__.partition(".")[0] in _NOT_ENTERED:
        return Held()
    cells = [(cell, _contents(cell)) for cell in function.__closure__ or ()]
    own = function.__globals__
    named = {name: own[name] for name in function.__code__.co_names if name in own and _is_state(own[name])}

    def restore() -> None:
        for cell, before in cells:
            if _contents(cell) is not before and before is not _EMPTY:
                cell.cell_contents = before
        for name, before in named.items():
            if own.get(name) is not before:
                own[name] = before

    return Held(restore, [*(one for _, one in cells), *named.values(), function.__defaults__, function.__kwdefaults__])


_EMPTY = object()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _EMPTY


def _is_state(value: Any) -> bool:
    """Return whether a variable of a module is something that a function may count in."""
    return isinstance(value, int | float | list | dict | set | deque | np.ndarray | random.Random | np.random.Generator)


def _put_back_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    now = dict(items_of(value))
    if len(now) != len(before) or any(now.get(key, _EMPTY) is not one for key, one in before.items()):
        own_method(value, "clear")()
        put = own_method(value, "__setitem__")
        for key, one in before.items():
            put(key, one)


def _put_back_list(value: Any, before: list[Any]) -> None:
    now = elements_of(value)
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    own_method(value, "clear")()
    own_method(value, "extend")(before)


def _put_back_set(value: set[Any], before: set[Any]) -> None:
    if set(elements_of(value)) != before:
        own_method(value, "clear")()
        own_method(value, "update")(before)


def _array(value: Any) -> Callable[[], object] | None:
    if value.nbytes > _MOST_BYTES or not value.flags.writeable:
        return None
    return functools.partial(np.copyto, value, value.copy())
