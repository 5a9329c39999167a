"""Trial runs: run a user's model once more, and restore counters, lists, caches and random numbers."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from commlib.errors import UsageError
from commlib.snapshot.iterators import iterators_in
from commlib.snapshot.object_snapshot import ObjectSnapshot
from commlib.snapshot.reachable_code import (
    is_followed,
    is_installed,
    is_users,
    is_users_kind,
    is_users_module,
    list_imports,
    names_in,
    sees_all,
    variables_of,
)
from commlib.snapshot.snapshot_kinds import (
    methods,
    snapshot_attributes,
    snapshot_class,
    snapshot_variables,
    snapshots_for,
)

__all__ = ["ObjectSnapshot", "snapshot_attributes", "is_users", "run_trial"]

MOST = 100_000
"""Maximum number of objects visited from each root. Larger contents, such as a data set, are not followed further."""
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


@contextmanager
def run_trial(roots: Iterable[Any], hold: Callable[[Any], ObjectSnapshot | None], extra: Any = ()) -> Iterator[None]:
    """Restore everything reachable from `roots`, in place, and the random numbers of Python and numpy.

    That is: lists, dicts, sets, arrays, attributes of objects, of their classes and of functions, generators of random
    numbers, closures of functions, and the objects that functions name: variables of their module and of others,
    classes and their attributes, and so on. hold: takes a snapshot of a framework's objects; None for all others.
    extra: the arguments of the model. Warns of changes that cannot be restored; a consumed iterator in `extra` is a
    UsageError.
    """
    seen = _ReachableObjects(hold)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        seen.look(extra, "a call's arguments keep")
        for root in roots:
            seen.look(root, "the model keeps")
        seen.note_variables()
        yield
    finally:
        changed = seen.put_back()
        random.setstate(python)
        np.random.set_state(numpy)
        used = changed.keys() & iterators_in(extra) if changed else set()
        for what in dict.fromkeys(what for key, what in changed.items() if key not in used):
            _warn(f"a trial run of the model has changed {what}, which cannot be restored: later calls see the change")
    if used:
        raise UsageError(
            f"the model is called with {changed[used.pop()]}, which a trial run of the call has consumed. Pass a list, "
            "or another object that can be iterated more than once"
        )


def _snapshot(how: Callable[[Any], ObjectSnapshot], value: Any) -> ObjectSnapshot:
    """Snapshot an object; skip one without state, such as `random.SystemRandom`, or, with a warning, one that fails."""
    try:
        return how(value)
    except NotImplementedError:
        return ObjectSnapshot()
    except Exception as error:
        _warn(f"a trial run of the model does not restore a {type(value).__name__}: reading its state fails: {error!r}")
        return ObjectSnapshot()


class _ReachableObjects:
    def __init__(self, hold: Callable[[Any], ObjectSnapshot | None]) -> None:
        self._hold = hold
        self._snapshots: dict[int, Any] = {}
        self._references: dict[int, list[Any]] = {}
        """The objects directly reachable from each object."""
        self._ways: dict[type, list[Callable[[Any], ObjectSnapshot]]] = {}
        self._names = set[str]()
        """The names in functions that may run."""
        self._unnamed: dict[str, list[Any]] = {}
        """Methods of classes and variables of modules that no function has named yet."""
        self._tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """Variables of modules, and the names of those that may change."""
        self._restores: list[tuple[int, Callable[[], object]]] = []

    def look(self, root: Any, keeps: str) -> None:
        """Snapshot all objects reachable from a root: code first, then the nearest objects."""
        code, data = deque[Any](), deque([root])
        reached = set[int]()  # per root: shared objects are followed again, past another root's limit
        while code or data:
            value = (code or data).popleft()
            if type(value) in _ATOMS or id(value) in reached:
                continue
            if len(reached) >= MOST:
                _warn(f"{keeps} more than {MOST} objects: a trial run does not restore the farthest ones")
                break
            reached.add(id(value))
            if id(value) not in self._snapshots:
                self._snapshots[id(value)], self._references[id(value)] = value, self._inside(value)
            for one in self._references[id(value)]:
                (code if issubclass(type(one), _CODE) else data).append(one)

    def put_back(self) -> dict[int, str]:
        """Restore all objects; return descriptions of the changes that cannot be restored, by object id."""
        changed = {}
        for key, restore in self._restores:
            try:
                what = restore()
            except Exception as error:
                what = f"a {type(self._snapshots.get(key)).__name__}, whose restore fails ({error})"
            if isinstance(what, str):
                changed[key] = what
        return changed

    def note_variables(self) -> None:
        """Snapshot the variables of modules that may change, once all names are known."""
        for table, names in self._tables.values():
            self._keep_restore(table, snapshot_variables(table, names))

    def _inside(self, value: Any) -> list[Any]:
        """Snapshot an object; return the objects directly reachable from it."""
        kind = type(value)
        if issubclass(kind, ModuleType):
            return self._module(value) if is_users_module(value) else []
        if issubclass(kind, type):
            return self._class(value)
        snapshot = self._hold(value)
        inside = [kind, *self._keep_restore(value, snapshot)] if snapshot is not None else self._object(value)
        return inside + self._function(value) if kind is FunctionType and is_users_kind(value) else inside

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind not in self._ways:
            self._ways[kind] = snapshots_for(kind)
        return [kind, *(one for how in self._ways[kind] for one in self._keep_restore(value, _snapshot(how, value)))]

    def _keep_restore(self, value: Any, snapshot: ObjectSnapshot) -> Iterable[Any]:
        if snapshot.restore is not None:
            self._restores.append((id(value), snapshot.restore))
        return snapshot.inside

    def _class(self, kind: Any) -> list[Any]:
        """Snapshot a class. Methods of users' classes may be called by computed names; methods of libraries may not.

        Methods with names in underscores are called by Python itself.
        """
        above = [type(kind), *kind.__mro__[1:]]
        if not is_users_kind(kind):
            return above
        computed, named = list[FunctionType](), list[tuple[str, FunctionType]]()
        for name, one in methods(kind):
            if name.startswith("__") or not is_installed(kind):
                computed.append(one)
            else:
                named.append((name, one))
        return [*above, *self._keep_restore(kind, snapshot_class(kind)), *computed, *self._add_named(named)]

    def _module(self, module: ModuleType) -> list[Any]:
        table = variables_of(module)
        self._tables[id(table)] = table, self._names
        return self._add_named((name, one) for name, one in table.items() if not name.startswith("__"))

    def _function(self, function: FunctionType) -> list[Any]:
        """Snapshot the variables that a function names; return them, and the methods that it may call by name."""
        own, names = function.__globals__, names_in(function.__code__)
        named = set(own) if sees_all(names) else names
        _, seen = self._tables.setdefault(id(own), (own, set()))
        if seen is not self._names:
            seen |= named
        values = [*(own[name] for name in named if name in own), *list_imports(function)]
        return [*(one for one in values if is_followed(function, one)), *self._newly_named(names)]

    def _newly_named(self, names: set[str]) -> list[Any]:
        new = names - self._names
        self._names |= new
        return [one for name in new for one in self._unnamed.pop(name, ())]

    def _add_named(self, every: Iterable[tuple[str, Any]]) -> list[Any]:
        """Add objects that are reachable by name; return those whose name is already used."""
        called = []
        for name, one in every:
            if name in self._names:
                called.append(one)
            else:
                self._unnamed.setdefault(name, []).append(one)
        return called


_CODE = (FunctionType, ModuleType, type)
_warned = set[str]()


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)
