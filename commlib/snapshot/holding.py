"""Holding: what puts an object back as it was, for each kind of object that a model may keep."""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import threading
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, UserString, deque
from collections.abc import Callable, Set
from contextvars import ContextVar
from functools import lru_cache, partial
from queue import Queue, SimpleQueue
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np

from commlib.snapshot.contents import elements_of, items_of, own_method
from commlib.snapshot.held import EMPTY, Held, each, same
from commlib.snapshot.held_iterators import ITERATORS, held_iterator
from commlib.snapshot.held_queues import held_queue, held_simple_queue
from commlib.snapshot.reached import functions_of, is_users_kind

_MOST_BYTES = 2**28


def ways(kind: type) -> list[Callable[[Any], Held]]:
    """Return how objects of a class are held: what they contain, and their attributes."""
    if issubclass(kind, Queue):
        return [held_queue]
    found = [next((how for known, how in _CONTENTS if issubclass(kind, known)), None)]
    if kind is not FunctionType and (is_users_kind(kind) or issubclass(kind, _WITH_ATTRIBUTES) or _is_mock(kind)):
        found.append(attributes)
    return [how for how in found if how is not None]


def attributes(value: Any) -> Held:
    """Hold the attributes of an object, those in slots, too."""
    own, slots = attributes_of(value), _slots(value)
    if not slots.inside:
        return own
    return Held(partial(each, (own.restore, slots.restore)), [*own.inside, *slots.inside])


def attributes_of(value: Any) -> Held:
    """Hold what is in the `__dict__` of an object, if it has one."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return Held()
    if not isinstance(own, dict):
        return Held()
    held, kind = _dict(own), type(value)

    def restore() -> object:
        if type(value) is not kind:
            object.__setattr__(value, "__class__", kind)
        if object.__getattribute__(value, "__dict__") is not own:
            object.__setattr__(value, "__dict__", own)
        return each((held.restore,))

    return Held(restore, held.inside)


def class_attributes(kind: Any) -> Held:
    """Hold the attributes of a class, whose functions are told by their names: see `functions_of`."""
    before = dict(type.__getattribute__(kind, "__dict__"))

    def restore() -> None:
        now = dict(type.__getattribute__(kind, "__dict__"))
        for name in now.keys() - before.keys():
            if not name.startswith("__"):  # else Python may have put it there
                type.__delattr__(kind, name)
        for name, one in before.items():
            if now.get(name, EMPTY) is not one:
                type.__setattr__(kind, name, one)

    return Held(restore, [one for one in before.values() if type(one) is not FunctionType])


def methods(kind: Any) -> list[tuple[str, FunctionType]]:
    """Return the functions of a class by their names."""
    return functions_of(type.__getattribute__(kind, "__dict__"))


def variables(table: dict[str, Any], names: Set[str]) -> Held:
    """Hold the variables of a module that have these names. What is defined there nobody is taken to rebind."""
    known = set(table)
    before = [(name, one) for name in names & known if not issubclass(type(one := table[name]), _DEFINED)]

    def restore() -> None:
        for name, one in before:
            if table.get(name, EMPTY) is not one:
                table[name] = one
        for name in names & (table.keys() - known):
            if not issubclass(type(table[name]), ModuleType):  # else it was imported, which is done once
                del table[name]

    return Held(restore)


_DEFINED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def _is_mock(kind: type) -> bool:
    return kind.__module__ == "unittest.mock"


def _inside(*names: str) -> Callable[[Any], Held]:
    """Return how objects are held that never change, and keep others by these names."""
    return lambda value: Held(None, [getattr(value, name) for name in names])


def _slots(value: Any) -> Held:
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]  # else it is no object of Python's
    slots = [one for kind in kinds for one in vars(kind).values() if type(one) is MemberDescriptorType]
    before = [(slot, _in_slot(slot, value)) for slot in slots]

    def restore() -> None:
        for slot, one in before:
            if _in_slot(slot, value) is one:
                continue
            if one is EMPTY:
                slot.__delete__(value)
            else:
                slot.__set__(value, one)

    return Held(restore, [one for _, one in before])


def _in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # nothing is in it
        return EMPTY


def _dict(value: dict[Any, Any]) -> Held:
    before = list(items_of(value))

    def restore() -> None:
        now = list(items_of(value))
        if len(now) == len(before) and all(
            key is own and one is other for (key, one), (own, other) in zip(now, before, strict=True)
        ):
            return
        own_method(value, "clear")()
        put = own_method(value, "__setitem__")
        for key, one in before:
            put(key, one)

    return Held(restore, [one for pair in before for one in pair])


def _list(value: Any) -> Held:
    before = elements_of(value)

    def restore() -> None:
        if not same(elements_of(value), before):
            own_method(value, "clear")()
            own_method(value, "extend")(before)

    return Held(restore, before)


def _set(value: Any) -> Held:
    before = elements_of(value)

    def restore() -> None:
        if set(map(id, elements_of(value))) != set(map(id, before)):
            own_method(value, "clear")()
            own_method(value, "update")(before)

    return Held(restore, before)


def _bytes(value: Any) -> Held:
    before = bytes(value)

    def restore() -> None:
        if bytes(value) != before:
            bytearray.__setitem__(value, slice(None), before)

    return Held(restore)


def _machine_values(value: Any) -> Held:
    before = value[:]

    def restore() -> None:
        if value.tobytes() != before.tobytes():
            value[:] = before

    return Held(restore)


def _masked_array(value: Any) -> Held:
    before = value.copy()

    def restore() -> None:
        value.mask = np.ma.nomask
        value.data[...] = before.data
        value.mask = before.mask

    return Held(restore)


def _array(value: Any) -> Held:
    inside = value.ravel().tolist() if value.dtype == object else ()
    if value.nbytes > _MOST_BYTES or not value.flags.writeable:
        return Held(None, inside)
    return Held(partial(np.copyto, value, value.copy()), inside)


def _function(function: FunctionType) -> Held:
    """Hold attributes, defaults and code of a function, and what it has closed over. See `variables` of its module."""
    if not is_users_kind(function):
        return Held()
    cells = [(cell, _contents(cell)) for cell in function.__closure__ or ()]
    noted = attributes_of(function)
    defaults, code = (function.__defaults__, function.__kwdefaults__), function.__code__

    def restore() -> None:
        each([noted.restore])
        if function.__defaults__ is not defaults[0]:
            function.__defaults__ = defaults[0]
        if function.__kwdefaults__ is not defaults[1]:
            function.__kwdefaults__ = defaults[1]
        if function.__code__ is not code:
            function.__code__ = code
        for cell, before in cells:
            if _contents(cell) is before:
                continue
            if before is EMPTY:
                del cell.cell_contents
            else:
                cell.cell_contents = before

    return Held(restore, [*(one for _, one in cells), *defaults, *noted.inside])


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return EMPTY


def _cached(function: Any) -> Held:
    """Hold a function with a cache: what a look has put in is taken out, for what the function did then is undone."""
    before = function.cache_info()
    known = _entries(function)
    keys = None if known is None else list(known)

    def restore() -> None:
        if function.cache_info().misses == before.misses:
            return
        if known is None or not keys:
            function.cache_clear()
            return
        for key in list(known)[len(keys) :]:
            del known[key]

    return Held(restore, attributes_of(function).inside)


def _entries(function: Any) -> dict[Any, Any] | None:
    """Return the entries of a cache, if it has no bound: to one that has one, its order is more than that."""
    if function.cache_parameters()["maxsize"] is not None:
        return None
    own = getattr(function, "__dict__", None)
    found = [one for one in gc.get_referents(function) if type(one) is dict and one is not own]
    return found[0] if len(found) == 1 else None


def _context_variable(variable: ContextVar[Any]) -> Held:
    before = _in_context(variable)

    def restore() -> str | None:
        if _in_context(variable) is before:
            return None
        if before is EMPTY:
            return f"the variable {variable.name} of a context, which was not set"
        variable.set(before)
        return None

    return Held(restore, [before])


def _in_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:  # it is not set, and has no default
        return EMPTY


def _of_thread(value: Any) -> Held:
    return _dict(threading.local.__getattribute__(value, "__dict__"))


def _bits(value: Any) -> Held:
    return Held(partial(setattr, value, "state", value.state), [getattr(value, "seed_seq", None)])


def _seed(value: Any) -> Held:
    before = value.n_children_spawned
    return Held(lambda: "a SeedSequence, which spawned others" if value.n_children_spawned != before else None)


def _referents(value: Any) -> Held:
    """Hold what nothing but the garbage collector can look into."""
    return Held(None, gc.get_referents(value))


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_WITH_ATTRIBUTES = (SimpleNamespace, argparse.Namespace, UserDict, UserList, UserString, ChainMap, *_WEAK)
"""Kinds of Python's own library whose state is in attributes."""
_OVER_OTHERS = (map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice)
_CONTENTS: tuple[tuple[Any, Callable[[Any], Held]], ...] = (
    (FunctionType, _function),
    (dict, _dict),
    ((list, deque), _list),
    (set, _set),
    ((tuple, frozenset), lambda value: Held(None, elements_of(value))),
    (bytearray, _bytes),
    (array, _machine_values),
    (memoryview, _inside("obj")),
    (np.ma.MaskedArray, _masked_array),
    (np.ndarray, _array),
    (np.random.Generator, _inside("bit_generator")),
    (np.random.BitGenerator, _bits),
    (np.random.SeedSequence, _seed),
    (np.random.RandomState, lambda value: Held(partial(value.set_state, value.get_state()))),
    (random.Random, lambda value: Held(partial(value.setstate, value.getstate()))),
    (type(lru_cache(repr)), _cached),
    (MethodType, _inside("__self__", "__func__")),
    ((BuiltinFunctionType, MethodWrapperType), _inside("__self__")),
    (partial, _inside("func", "args", "keywords")),
    (weakref.ref, lambda value: Held(None, [weakref.ref.__call__(value)])),
    (MappingProxyType, _referents),
    (ContextVar, _context_variable),
    (threading.local, _of_thread),
    (SimpleQueue, held_simple_queue),
    (ITERATORS, held_iterator),
    (_OVER_OTHERS, _referents),
)
"""How objects of known classes are held, the first that fits."""
