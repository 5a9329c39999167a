"""Unnoticed: run a user's model once more, and leave counters, lists, caches and random numbers as they were."""

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
from commlib.snapshot.held import Held
from commlib.snapshot.held_iterators import iterators_in
from commlib.snapshot.holding import attributes, class_attributes, methods, variables, ways
from commlib.snapshot.reached import (
    imported_by,
    is_followed,
    is_installed,
    is_users,
    is_users_kind,
    is_users_module,
    names_in,
    sees_all,
    variables_of,
)

__all__ = ["Held", "attributes", "is_users", "unnoticed"]

MOST = 100_000
"""Objects that are looked at from each root. What keeps more, such as a whole data set, is not followed further."""
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


@contextmanager
def unnoticed(roots: Iterable[Any], hold: Callable[[Any], Held | None], given: Any = ()) -> Iterator[None]:
    """Leave what can be reached from `roots` as it is, in place, and the random numbers of Python and numpy.

    That is: lists, dicts, sets, arrays, attributes of objects, of their classes and of functions, generators of random
    numbers, what functions have closed over, and what they name: variables of their module and of others, classes and
    what these have, and so on. hold: knows objects of a framework; None for all others. given: with what a model is
    called. Warns of what has changed and cannot be put back; an iterator in `given` that is used up is a UsageError.
    """
    seen = _Seen(hold)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        seen.look(given, "a call's arguments keep")
        for root in roots:
            seen.look(root, "the model keeps")
        seen.note_variables()
        yield
    finally:
        changed = seen.put_back()
        random.setstate(python)
        np.random.set_state(numpy)
        used = changed.keys() & iterators_in(given) if changed else set()
        for what in dict.fromkeys(what for key, what in changed.items() if key not in used):
            _warn(f"a look at the model has changed {what}, and cannot put it back: its next calls see that")
    if used:
        raise UsageError(
            f"the model is called with {changed[used.pop()]}, which a look at that call has used up: give a list, or "
            "what else can be gone through more than once"
        )


def _held(how: Callable[[Any], Held], value: Any) -> Held:
    """Hold an object; leave one alone that has no state, as `random.SystemRandom`, or, with a warning, does not say."""
    try:
        return how(value)
    except NotImplementedError:
        return Held()
    except Exception as error:
        _warn(
            f"a look at the model does not put back a {type(value).__name__}, which fails when it is asked: {error!r}"
        )
        return Held()


class _Seen:
    def __init__(self, hold: Callable[[Any], Held | None]) -> None:
        self._hold = hold
        self._known: dict[int, Any] = {}
        self._within: dict[int, list[Any]] = {}
        """What can be reached from each of these at once."""
        self._ways: dict[type, list[Callable[[Any], Held]]] = {}
        self._names = set[str]()
        """What functions name that may run."""
        self._unnamed: dict[str, list[Any]] = {}
        """Methods of classes and variables of modules, that nobody has named yet."""
        self._tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """Variables of modules, and the names of those that may change."""
        self._restores: list[tuple[int, Callable[[], object]]] = []

    def look(self, root: Any, keeps: str) -> None:
        """Note all that can be reached from an object: first by code, then what lies nearest."""
        code, data = deque[Any](), deque([root])
        reached = set[int]()  # from here: what another root has, too, is followed again, as that one's limit may end it
        while code or data:
            value = (code or data).popleft()
            if type(value) in _ATOMS or id(value) in reached:
                continue
            if len(reached) >= MOST:
                _warn(f"{keeps} more than {MOST} objects: a look does not put back what the furthest keep")
                break
            reached.add(id(value))
            if id(value) not in self._known:
                self._known[id(value)], self._within[id(value)] = value, self._inside(value)
            for one in self._within[id(value)]:
                (code if issubclass(type(one), _CODE) else data).append(one)

    def put_back(self) -> dict[int, str]:
        """Put all back; return what has changed and cannot be put back, in words, by the ids of objects."""
        changed = {}
        for key, restore in self._restores:
            try:
                what = restore()
            except Exception as error:
                what = f"a {type(self._known.get(key)).__name__}, which fails when it is put back ({error})"
            if isinstance(what, str):
                changed[key] = what
        return changed

    def note_variables(self) -> None:
        """Note variables of modules, now that it is known which may change."""
        for table, names in self._tables.values():
            self._noted(table, variables(table, names))

    def _inside(self, value: Any) -> list[Any]:
        """Note an object; return those that can be reached from it."""
        kind = type(value)
        if issubclass(kind, ModuleType):
            return self._module(value) if is_users_module(value) else []
        if issubclass(kind, type):
            return self._class(value)
        known = self._hold(value)
        inside = [kind, *self._noted(value, known)] if known is not None else self._object(value)
        return inside + self._function(value) if kind is FunctionType and is_users_kind(value) else inside

    def _object(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind not in self._ways:
            self._ways[kind] = ways(kind)
        return [kind, *(one for how in self._ways[kind] for one in self._noted(value, _held(how, value)))]

    def _noted(self, value: Any, held: Held) -> Iterable[Any]:
        if held.restore is not None:
            self._restores.append((id(value), held.restore))
        return held.inside

    def _class(self, kind: Any) -> list[Any]:
        """Note a class. Its methods may be called by any name, which a user may compute; of libraries by known ones.

        What Python itself calls has a name in underscores.
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
        return [*above, *self._noted(kind, class_attributes(kind)), *computed, *self._defined(named)]

    def _module(self, module: ModuleType) -> list[Any]:
        table = variables_of(module)
        self._tables[id(table)] = table, self._names
        return self._defined((name, one) for name, one in table.items() if not name.startswith("__"))

    def _function(self, function: FunctionType) -> list[Any]:
        """Note the variables that a function names; return them, and what it may call by a name."""
        own, names = function.__globals__, names_in(function.__code__)
        named = set(own) if sees_all(names) else names
        _, known = self._tables.setdefault(id(own), (own, set()))
        if known is not self._names:
            known |= named
        found = [*(own[name] for name in named if name in own), *imported_by(function)]
        return [*(one for one in found if is_followed(function, one)), *self._called(names)]

    def _called(self, names: set[str]) -> list[Any]:
        new = names - self._names
        self._names |= new
        return [one for name in new for one in self._unnamed.pop(name, ())]

    def _defined(self, every: Iterable[tuple[str, Any]]) -> list[Any]:
        """Note what can be had by names; return what is had by one that is known."""
        called = []
        for name, one in every:
            if name in self._names:
                called.append(one)
            else:
                self._unnamed.setdefault(name, []).append(one)
        return called


_CODE = (FunctionType, ModuleType, type)
_told = set[str]()


def _warn(text: str) -> None:
    if text not in _told:
        _told.add(text)
        warnings.warn(text, stacklevel=4)
