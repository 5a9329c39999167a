"""Iterators in a snapshot: they cannot be restored, but a snapshot detects that one has advanced."""

from __future__ import annotations

import gc
import itertools
import operator
from collections import deque
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any

from commlib.snapshot.object_snapshot import ObjectSnapshot, are_same_objects

_MOST = 1000
_ITERABLES: tuple[Any, ...] = ([], (), "", b"", {}, {}.values(), {}.items(), set(), range(0), deque(), reversed([]))
_ITERATORS = tuple(type(iter(one)) for one in _ITERABLES)
ITERATORS: tuple[type, ...] = (GeneratorType, itertools.count, *_ITERATORS)
"""Kinds of iterators whose position can be read."""
_DEFINED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def snapshot_iterator(value: Any) -> ObjectSnapshot:
    """Record the position of an iterator; restore reports whether it has advanced."""
    before = _position(value)
    frame = value.gi_frame if type(value) is GeneratorType else None
    inside = [] if frame is None else [one for name, one in frame.f_locals.items() if name != ".0"]

    def restore() -> str | None:
        numbers, objects = _position(value)
        is_same = numbers == before[0] and are_same_objects(objects, before[1])
        return None if is_same else f"a {type(value).__name__}{_describe_name(value)}"

    return ObjectSnapshot(restore, inside)


def _describe_name(value: Any) -> str:
    return f" ({value.__name__})" if type(value) is GeneratorType else ""


def _position(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the position of an iterator: numbers, and objects that are replaced when it advances."""
    if type(value) is GeneratorType:
        if value.gi_frame is None:
            return [], []
        numbers, objects = _position(value.gi_yieldfrom)
        return [value.gi_frame.f_lasti, *numbers], [*value.gi_frame.f_locals.values(), *objects]
    if type(value) in _ITERATORS:
        return [operator.length_hint(value)], []
    return ([repr(value)], []) if type(value) is itertools.count else ([], [value])


def iterators_in(root: Any) -> set[int]:
    """Return the ids of built-in iterators among arguments, and in the contents of these."""
    waiting, seen, result = deque([root]), set[int](), set[int]()
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        if id(value) in seen or issubclass(type(value), _DEFINED):
            continue
        seen.add(id(value))
        if issubclass(type(value), ITERATORS):
            result.add(id(value))
        waiting += gc.get_referents(value)
    return result
