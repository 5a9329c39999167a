"""Snapshots of objects: restore functions for each kind of object that a model may keep."""

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
from commlib.snapshot.iterators import ITERATORS, snapshot_iterator
from commlib.snapshot.object_snapshot import EMPTY, ObjectSnapshot, are_same_objects, restore_all
from commlib.snapshot.queues import snapshot_queue, snapshot_simple_queue
from commlib.snapshot.reachable_code import functions_of, is_users_kind

_MOST_BYTES = 2**28


def snapshots_for(kind: type) -> list[Callable[[Any], ObjectSnapshot]]:
    """Return the snapshot functions for a class: for the contents of its objects, and for their attributes."""
    if issubclass(kind, Queue):
        return [snapshot_queue]
    matches = [next((how for base, how in _CONTENTS if issubclass(kind, base)), None)]
    if kind is not FunctionType and (is_users_kind(kind) or issubclass(kind, _WITH_ATTRIBUTES) or _is_mock(kind)):
        matches.append(snapshot_attributes)
    return [how for how in matches if how is not None]


def snapshot_attributes(value: Any) -> ObjectSnapshot:
    """Snapshot the attributes of an object, including those in slots."""
    own, slots = snapshot_dict(value), _slots(value)
    if not slots.inside:
        return own
    return ObjectSnapshot(partial(restore_all, (own.restore, slots.restore)), [*own.inside, *slots.inside])


def snapshot_dict(value: Any) -> ObjectSnapshot:
    """Snapshot the `__dict__` of an object, if it has one."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ObjectSnapshot()
    if not isinstance(own, dict):
        return ObjectSnapshot()
    entries, kind = _dict(own), type(value)

    def restore() -> object:
        if type(value) is not kind:
            object.__setattr__(value, "__class__", kind)
        if object.__getattribute__(value, "__dict__") is not own:
            object.__setattr__(value, "__dict__", own)
        return restore_all((entries.restore,))

    return ObjectSnapshot(restore, entries.inside)


def snapshot_class(kind: Any) -> ObjectSnapshot:
    """Snapshot the attributes of a class. Functions are found by name: see `functions_of`."""
    before = dict(type.__getattribute__(kind, "__dict__"))

    def restore() -> None:
        now = dict(type.__getattribute__(kind, "__dict__"))
        for name in now.keys() - before.keys():
            if not name.startswith("__"):  # other names may be set by Python itself
                type.__delattr__(kind, name)
        for name, one in before.items():
            if now.get(name, EMPTY) is not one:
                type.__setattr__(kind, name, one)

    return ObjectSnapshot(restore, [one for one in before.values() if type(one) is not FunctionType])


def methods(kind: Any) -> list[tuple[str, FunctionType]]:
    """Return the functions of a class by their names."""
    return functions_of(type.__getattribute__(kind, "__dict__"))


def snapshot_variables(table: dict[str, Any], names: Set[str]) -> ObjectSnapshot:
    """Snapshot the variables of a module with these names, except classes, modules and functions."""
    known = set(table)
    before = [(name, one) for name in names & known if not issubclass(type(one := table[name]), _DEFINED)]

    def restore() -> None:
        for name, one in before:
            if table.get(name, EMPTY) is not one:
                table[name] = one
        for name in names & (table.keys() - known):
            if not issubclass(type(table[name]), ModuleType):  # an import happens only once
                del table[name]

    return ObjectSnapshot(restore)


_DEFINED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def _is_mock(kind: type) -> bool:
    return kind.__module__ == "unittest.mock"


def _snapshot_inside(*names: str) -> Callable[[Any], ObjectSnapshot]:
    """Return the snapshot function for immutable objects that keep others in these attributes."""
    return lambda value: ObjectSnapshot(None, [getattr(value, name) for name in names])


def _slots(value: Any) -> ObjectSnapshot:
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]  # else not written in Python
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

    return ObjectSnapshot(restore, [one for _, one in before])


def _in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # the slot is empty
        return EMPTY


def _dict(value: dict[Any, Any]) -> ObjectSnapshot:
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

    return ObjectSnapshot(restore, [one for pair in before for one in pair])


def _list(value: Any) -> ObjectSnapshot:
    before = elements_of(value)

    def restore() -> None:
        if not are_same_objects(elements_of(value), before):
            own_method(value, "clear")()
            own_method(value, "extend")(before)

    return ObjectSnapshot(restore, before)


def _set(value: Any) -> ObjectSnapshot:
    before = elements_of(value)

    def restore() -> None:
        if set(map(id, elements_of(value))) != set(map(id, before)):
            own_method(value, "clear")()
            own_method(value, "update")(before)

    return ObjectSnapshot(restore, before)


def _bytes(value: Any) -> ObjectSnapshot:
    before = bytes(value)

    def restore() -> None:
        if bytes(value) != before:
            bytearray.__setitem__(value, slice(None), before)

    return ObjectSnapshot(restore)


def _machine_values(value: Any) -> ObjectSnapshot:
    before = value[:]

    def restore() -> None:
        if value.tobytes() != before.tobytes():
            value[:] = before

    return ObjectSnapshot(restore)


def _masked_array(value: Any) -> ObjectSnapshot:
    before = value.copy()

    def restore() -> None:
        value.mask = np.ma.nomask
        value.data[...] = before.data
        value.mask = before.mask

    return ObjectSnapshot(restore)


def _array(value: Any) -> ObjectSnapshot:
    inside = value.ravel().tolist() if value.dtype == object else ()
    if value.nbytes > _MOST_BYTES or not value.flags.writeable:
        return ObjectSnapshot(None, inside)
    return ObjectSnapshot(partial(np.copyto, value, value.copy()), inside)


def _function(function: FunctionType) -> ObjectSnapshot:
    """Snapshot the attributes, defaults, code and closed-over values of a function.

    See `snapshot_variables` for its module.
    """
    if not is_users_kind(function):
        return ObjectSnapshot()
    cells = [(cell, _cell_contents(cell)) for cell in function.__closure__ or ()]
    noted = snapshot_dict(function)
    defaults, code = (function.__defaults__, function.__kwdefaults__), function.__code__

    def restore() -> None:
        restore_all([noted.restore])
        if function.__defaults__ is not defaults[0]:
            function.__defaults__ = defaults[0]
        if function.__kwdefaults__ is not defaults[1]:
            function.__kwdefaults__ = defaults[1]
        if function.__code__ is not code:
            function.__code__ = code
        for cell, before in cells:
            if _cell_contents(cell) is before:
                continue
            if before is EMPTY:
                del cell.cell_contents
            else:
                cell.cell_contents = before

    return ObjectSnapshot(restore, [*(one for _, one in cells), *defaults, *noted.inside])


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return EMPTY


def _cached_function(function: Any) -> ObjectSnapshot:
    """Snapshot a function with a cache: entries that a probe adds are removed, since its effects are undone."""
    before = function.cache_info()
    entries = _entries(function)
    keys = None if entries is None else list(entries)

    def restore() -> None:
        if function.cache_info().misses == before.misses:
            return
        if entries is None or not keys:
            function.cache_clear()
            return
        for key in list(entries)[len(keys) :]:
            del entries[key]

    return ObjectSnapshot(restore, snapshot_dict(function).inside)


def _entries(function: Any) -> dict[Any, Any] | None:
    """Return the entries of a cache without a bound; None for a bounded cache, whose order of use matters."""
    if function.cache_parameters()["maxsize"] is not None:
        return None
    own = getattr(function, "__dict__", None)
    dicts = [one for one in gc.get_referents(function) if type(one) is dict and one is not own]
    return dicts[0] if len(dicts) == 1 else None


def _context_variable(variable: ContextVar[Any]) -> ObjectSnapshot:
    before = _in_context(variable)

    def restore() -> str | None:
        if _in_context(variable) is before:
            return None
        if before is EMPTY:
            return f"the context variable {variable.name}, which was not set before"
        variable.set(before)
        return None

    return ObjectSnapshot(restore, [before])


def _in_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:  # not set, and no default
        return EMPTY


def _thread_local(value: Any) -> ObjectSnapshot:
    return _dict(threading.local.__getattribute__(value, "__dict__"))


def _bits(value: Any) -> ObjectSnapshot:
    return ObjectSnapshot(partial(setattr, value, "state", value.state), [getattr(value, "seed_seq", None)])


def _seed(value: Any) -> ObjectSnapshot:
    before = value.n_children_spawned
    return ObjectSnapshot(
        lambda: "a SeedSequence, which spawned others" if value.n_children_spawned != before else None
    )


def _referents(value: Any) -> ObjectSnapshot:
    """List the contents of an object that only the garbage collector can read."""
    return ObjectSnapshot(None, gc.get_referents(value))


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_WITH_ATTRIBUTES = (SimpleNamespace, argparse.Namespace, UserDict, UserList, UserString, ChainMap, *_WEAK)
"""Kinds of the standard library whose state is in attributes."""
_OVER_OTHERS = (map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice)
_CONTENTS: tuple[tuple[Any, Callable[[Any], ObjectSnapshot]], ...] = (
    (FunctionType, _function),
    (dict, _dict),
    ((list, deque), _list),
    (set, _set),
    ((tuple, frozenset), lambda value: ObjectSnapshot(None, elements_of(value))),
    (bytearray, _bytes),
    (array, _machine_values),
    (memoryview, _snapshot_inside("obj")),
    (np.ma.MaskedArray, _masked_array),
    (np.ndarray, _array),
    (np.random.Generator, _snapshot_inside("bit_generator")),
    (np.random.BitGenerator, _bits),
    (np.random.SeedSequence, _seed),
    (np.random.RandomState, lambda value: ObjectSnapshot(partial(value.set_state, value.get_state()))),
    (random.Random, lambda value: ObjectSnapshot(partial(value.setstate, value.getstate()))),
    (type(lru_cache(repr)), _cached_function),
    (MethodType, _snapshot_inside("__self__", "__func__")),
    ((BuiltinFunctionType, MethodWrapperType), _snapshot_inside("__self__")),
    (partial, _snapshot_inside("func", "args", "keywords")),
    (weakref.ref, lambda value: ObjectSnapshot(None, [weakref.ref.__call__(value)])),
    (MappingProxyType, _referents),
    (ContextVar, _context_variable),
    (threading.local, _thread_local),
    (SimpleQueue, snapshot_simple_queue),
    (ITERATORS, snapshot_iterator),
    (_OVER_OTHERS, _referents),
)
"""Snapshot functions by class; the first match counts."""
