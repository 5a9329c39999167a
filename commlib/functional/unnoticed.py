"""Unnoticed: run a user's model once more, and leave counters, lists, caches and random numbers as they were."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np

from commlib.functional.contents import elements_of, items_of, own_method

_MOST = 100_000
"""Objects that are looked at. A model that keeps more, such as a whole data set, is not followed further."""
_MOST_BYTES = 2**28
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)
_DEFINED = (type, ModuleType, BuiltinFunctionType)
"""What no function rebinds."""
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

    That is: lists, dicts, sets, arrays, attributes of objects, of their classes and of functions, generators of random
    numbers, what functions have closed over, and the variables of modules that they name, or functions named there.
    hold: knows objects of a framework; None for all others.
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
        self._kinds = set[Any]()
        self._names = set[str]()
        """What functions name that may run."""
        self._methods: dict[str, list[FunctionType]] = {}
        """Of classes, that nobody has named yet."""
        self.restores: list[Callable[[], object]] = []

    def look(self, root: Any) -> None:
        """Note all that can be reached from an object."""
        waiting = [root]
        while waiting and len(self._known) < _MOST:
            value = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._known:
                continue
            self._known[id(value)] = value
            waiting += self._noted(self._hold(value) or self._held(value))
            if isinstance(value, FunctionType) and _is_users_kind(value):
                waiting += self._called(_names(value.__code__))
            for kind in () if type(value) in self._kinds else filter(_is_users_kind, type(value).__mro__):
                if kind not in self._kinds:
                    waiting += self._noted(_class(kind))
                    waiting += self._defined(_methods(kind))
            self._kinds.add(type(value))

    def _noted(self, held: Held) -> Iterable[Any]:
        if held.restore is not None:
            self.restores.append(held.restore)
        return held.inside

    def _called(self, names: set[str]) -> list[FunctionType]:
        """Note what a function names; return the methods that it may call."""
        new = names - self._names
        self._names |= new
        return [method for name in new for method in self._methods.pop(name, ())]

    def _defined(self, methods: dict[str, FunctionType]) -> list[FunctionType]:
        """Note methods of a class; return those that may be called: by a name that is known, or by Python itself."""
        called = []
        for name, method in methods.items():
            if name in self._names or name.startswith("__"):
                called.append(method)
            else:
                self._methods.setdefault(name, []).append(method)
        return called

    def _held(self, value: Any) -> Held:
        if isinstance(value, dict | list | deque | set | bytearray):
            held = _container(value)
            if not (hasattr(value, "__dict__") and is_users(value)):
                return held
            own = attributes(value)
            return Held(partial(_each, (held.restore, own.restore)), [*held.inside, *own.inside])
        if isinstance(value, tuple | frozenset):
            return Held(None, elements_of(value))
        if isinstance(value, np.ndarray):
            return Held(_array(value))
        if isinstance(value, np.random.Generator):
            return Held(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return Held(partial(value.set_state, value.get_state()))
        if isinstance(value, random.Random):
            return Held(partial(value.setstate, value.getstate()))
        if isinstance(value, FunctionType):
            return _function(value)
        if isinstance(value, MethodType):
            return Held(None, (value.__self__, value.__func__))
        if isinstance(value, partial):
            return Held(None, (value.func, value.args, value.keywords))
        if not is_users(value):
            return Held()
        return attributes(value) if hasattr(value, "__dict__") else _slots(value)


def is_users(value: Any) -> bool:
    """Return whether an object is the user's, or of a library of models, and not of Python, a framework or commlib."""
    return _is_users_kind(type(value)) or isinstance(value, SimpleNamespace)


def _is_users_kind(kind: Any) -> bool:
    package = (kind.__module__ or "").partition(".")[0]
    return package == "__main__" or not (package in _NOT_ENTERED or package in sys.stdlib_module_names)


def attributes(value: Any) -> Held:
    """Return what puts the attributes of an object back."""
    own = vars(value)
    return Held(partial(_put_back_dict, own, dict(own)), list(own.values()))


def _slots(value: Any) -> Held:
    """Hold the attributes of an object that has them in slots."""
    slots = [
        one for kind in type(value).__mro__ for one in vars(kind).values() if isinstance(one, MemberDescriptorType)
    ]
    before = [(slot, _in_slot(slot, value)) for slot in slots]

    def restore() -> None:
        for slot, held in before:
            if _in_slot(slot, value) is held:
                continue
            if held is _EMPTY:
                slot.__delete__(value)
            else:
                slot.__set__(value, held)

    return Held(restore, [held for _, held in before])


def _in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # nothing is in it
        return _EMPTY


def _class(kind: Any) -> Held:
    """Hold the attributes of a class."""
    before = dict(vars(kind))

    def restore() -> None:
        now = dict(vars(kind))
        for name in now.keys() - before.keys():
            delattr(kind, name)
        for name, held in before.items():
            if now.get(name, _EMPTY) is not held:
                setattr(kind, name, held)

    return Held(restore, [one for one in before.values() if not isinstance(one, FunctionType)])


def _methods(kind: Any) -> dict[str, FunctionType]:
    """Return the functions of a class by their names."""
    plain = {name: _unwrapped(one) for name, one in vars(kind).items()}
    return {name: one for name, one in plain.items() if isinstance(one, FunctionType)}


def _unwrapped(value: Any) -> Any:
    """Return the function of a property, and of a method without an object; all else as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _container(value: Any) -> Held:
    """Hold what is in a container that can be written."""
    if isinstance(value, dict):
        before = dict(items_of(value))
        return Held(partial(_put_back_dict, value, before), list(before.values()))
    if isinstance(value, list | deque):
        return Held(partial(_put_back_list, value, elements_of(value)), elements_of(value))
    if isinstance(value, bytearray):
        return Held(partial(value.__setitem__, slice(None), bytes(value)))
    return Held(partial(_put_back_set, value, set(elements_of(value))), ())


def _function(function: FunctionType) -> Held:
    """Hold the attributes of a function, what it has closed over, and the variables of its module that it names."""
    if not _is_users_kind(function):
        return Held()
    cells = [(cell, _contents(cell)) for cell in function.__closure__ or ()]
    own, names = function.__globals__, _names(function.__code__)
    named = {name: own.get(name, _EMPTY) for name in names if not isinstance(own.get(name), _DEFINED)}
    noted = attributes(function)

    def restore() -> None:
        _each([noted.restore])
        for cell, before in cells:
            if _contents(cell) is not before and before is not _EMPTY:
                cell.cell_contents = before
        for name, before in named.items():
            if own.get(name, _EMPTY) is before:
                continue
            if before is _EMPTY:
                del own[name]
            else:
                own[name] = before

    defaults = function.__defaults__, function.__kwdefaults__
    return Held(restore, [*(one for _, one in cells), *named.values(), *defaults, *noted.inside])


def _names(code: CodeType) -> set[str]:
    """Return the names that a function has of what is outside, and those that functions within it have."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def _each(restores: Iterable[Callable[[], object] | None]) -> None:
    for restore in restores:
        if restore is not None:
            restore()


_EMPTY = object()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _EMPTY


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
    return partial(np.copyto, value, value.copy())
