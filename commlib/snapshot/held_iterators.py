"""Held iterators: nobody can put them back, but who looks can tell that one has gone on."""

from __future__ import annotations

import gc
import itertools
import operator
from collections import deque
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any

from commlib.snapshot.held import Held, same

_MOST = 1000
_ITERABLES: tuple[Any, ...] = ([], (), "", b"", {}, {}.values(), {}.items(), set(), range(0), deque(), reversed([]))
_ITERATORS = tuple(type(iter(one)) for one in _ITERABLES)
ITERATORS: tuple[type, ...] = (GeneratorType, itertools.count, *_ITERATORS)
"""Kinds of iterators of which it can be told."""
_DEFINED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def held_iterator(value: Any) -> Held:
    """Hold an iterator, that is: find out whether somebody has asked it for more."""
    before = _position(value)
    frame = value.gi_frame if type(value) is GeneratorType else None
    inside = [] if frame is None else [one for name, one in frame.f_locals.items() if name != ".0"]

    def restore() -> str | None:
        numbers, objects = _position(value)
        is_same = numbers == before[0] and same(objects, before[1])
        return None if is_same else f"a {type(value).__name__}{_called(value)}"

    return Held(restore, inside)


def _called(value: Any) -> str:
    return f" ({value.__name__})" if type(value) is GeneratorType else ""


def _position(value: Any) -> tuple[list[Any], list[Any]]:
    """Return what tells how far an iterator is: numbers, and objects that are others when it goes on."""
    if type(value) is GeneratorType:
        if value.gi_frame is None:
            return [], []
        numbers, objects = _position(value.gi_yieldfrom)
        return [value.gi_frame.f_lasti, *numbers], [*value.gi_frame.f_locals.values(), *objects]
    if type(value) in _ITERATORS:
        return [operator.length_hint(value)], []
    return ([repr(value)], []) if type(value) is itertools.count else ([], [value])


def iterators_in(given: Any) -> set[int]:
    """Return the ids of iterators of Python's own among arguments, and in what these hold."""
    waiting, seen, found = deque([given]), set[int](), set[int]()
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        if id(value) in seen or issubclass(type(value), _DEFINED):
            continue
        seen.add(id(value))
        if issubclass(type(value), ITERATORS):
            found.add(id(value))
        waiting += gc.get_referents(value)
    return found
