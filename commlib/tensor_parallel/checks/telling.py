"""Telling: what is told of an argument, so that arguments by which a model may go another way are told apart.

A walk through what it holds, with bounds: models are called often. None of a user's code is asked.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from itertools import islice
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import numpy as np

from commlib.snapshot.contents import attributes_of, held_by, may_have_attributes


class Same:
    """An object that is told by being the same one. It is not kept, and what comes in its place is never it."""

    __slots__ = ("_at", "_found")

    def __init__(self, value: Any) -> None:
        self._at, self._found = id(value), weakref.ref(value)

    def __hash__(self) -> int:
        return self._at

    def __eq__(self, other: object) -> bool:
        if type(other) is not Same or self._at != other._at:
            return False
        found = self._found()
        return found is not None and found is other._found()


class Holding(NamedTuple):
    """What a framework tells of an object, and what that holds, which is told, too."""

    mark: Hashable
    held: tuple[Any, ...]


def kind_of(value: Any, kind_of_other: Callable[[Any], Hashable] = lambda _: None) -> Hashable:
    """Return what tells an argument from those of other kinds: its type, and those of what is in it.

    Of flags, strings, paths, members of an enumeration and classes also which; of functions their code and what they
    hold: closures, defaults, the object or class of a method; of objects their attributes. Not which strings are in
    lists, which may be a batch, nor which numbers come, or how many: they change with every call. Short lists of flags
    and of several kinds are told in order; of lists of tensors, and other objects, how many there are; but of what
    functions and objects hold only whether it is several: histories grow. Of a long list a sample is told.

    kind_of_other: what a framework tells of its own objects, and of what they hold; None if it knows nothing of one.
    What holds too much is told by being the same object.
    """
    kind: Any = type(value)
    try:
        leaf, asks, _ = _ways_of(kind)
    except TypeError:  # a class without a hash
        return Same(kind)
    told: Hashable = None
    if leaf is not None:
        told = leaf(value)
    elif asks:
        told = kind_of_other(value)
    return told if told is not None and type(told) is not Holding else _Walk(kind_of_other).of(value)


class _Walk:
    """A walk through an argument.

    other: what a framework tells. within: it is in what functions and objects hold. left: how much may still come.
    """

    __slots__ = ("_depth", "_kept", "_known", "left", "other", "within")

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self.other, self.within, self.left = other, False, _MOST
        self._depth = 0
        self._known: dict[int, Any] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> Any:
        """Return what is told of a value. What comes again within itself is told by how deep that is."""
        kind: Any = type(value)
        try:
            leaf, asks, handle = _ways_of(kind)
        except TypeError:
            return Same(kind)
        if leaf is not None:
            return leaf(value)
        if asks:
            told = self.other(value)
            if type(told) is Holding:
                value, handle = self.keep(told), _holding
            elif told is not None:
                return told
        if handle is None:
            return type(value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        if self.left <= 0 or self._depth == _DEEP:
            return _of_too_much(value)
        self._known[id(value)] = _AGAIN, self._depth
        self._depth += 1
        self.left -= 1
        found = handle(value, self)
        self._depth -= 1
        self._known[id(value)] = found
        return found

    def keep(self, value: Any) -> Any:
        """Return a value that nobody else may hold: another one in its place would be taken for it."""
        self._kept.append(value)
        return value

    def all_within(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return what is told of what a function, or an object, holds."""
        before, self.within = self.within, True
        found = tuple([self.of(one) for one in values])
        self.within = before
        return found


Leaf = Callable[[Any], Any]
Handle = Callable[[Any, _Walk], Any]
Ways = tuple[Leaf | None, bool, Handle | None]
"""What tells a value at once, or else whether a framework is asked first, and what walks through it, if anything."""


@functools.lru_cache(1000)
def _ways_of(kind: Any) -> Ways:
    """Return what tells the kinds of values of a type. Values are not asked for their class: some are of a trace."""
    if kind in _NUMBERS:
        return _TYPE
    if kind in (bool, str, np.bool_):
        return _itself, False, None
    leaf = next((leaf for base, leaf in _LEAVES if issubclass(kind, base)), None)
    if leaf is None and (kind.__module__ == "typing" or kind in (GenericAlias, UnionType)):
        leaf = _hashed
    if leaf is not None:
        return leaf, False, None
    handle = next((handle for base, handle in _HANDLES if issubclass(kind, base)), None)
    if handle is not None:
        is_own = issubclass(kind, _CONTAINERS) and kind.__module__ != "collections" and may_have_attributes(kind)
        return None, False, functools.partial(_with_attributes, handle) if is_own else handle
    if is_dataclass(kind):
        return None, True, _fields
    return None, True, None if _is_opaque(kind) or not may_have_attributes(kind) else _object


def _is_opaque(kind: type) -> bool:
    """Return whether objects of a class are files, locks, loggers, or else of Python's own library: not looked into."""
    packages = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return not packages.isdisjoint(sys.stdlib_module_names - _OPEN)


def _class(value: Any) -> Any:
    return Same(value) if type(value).__hash__ is None else value


def _itself(value: Any) -> Any:
    return value


def _hashed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


def _string(value: Any) -> Any:
    return type(value), str.__str__(value)


def _member(value: Any) -> Any:
    return type(value), value.name, value.value if isinstance(value, Flag) else None


def _array(value: Any) -> Any:
    return type(value), value.dtype, value.ndim


def _holding(value: Holding, walk: _Walk) -> Any:
    return value.mark, *walk.all_within(value.held)


def _called(value: Any, walk: _Walk) -> Any:
    """Tell a function by its code, which is that of each lambda of a line, and by what it holds."""
    return value.__code__, *walk.all_within(held_by(value))


def _method(value: Any, walk: _Walk) -> Any:
    return MethodType, *walk.all_within((value.__func__, value.__self__))


def _partial(value: Any, walk: _Walk) -> Any:
    held = value.func, *value.args, *value.keywords.values()
    return type(value), *value.keywords, *walk.all_within(held)


def _builtin(value: Any, walk: _Walk) -> Any:
    owner = value.__self__
    if owner is None or issubclass(type(owner), type | ModuleType):
        return value
    return type(value), value.__name__, *walk.all_within((owner,))


def _operator(value: Any, walk: _Walk) -> Any:
    return type(value), *walk.all_within(walk.keep(value.__reduce__()))


def _referred(value: Any, walk: _Walk) -> Any:
    return type(value), walk.of(walk.keep(value()))


def _tuple(value: Any, walk: _Walk) -> Any:
    length = tuple.__len__(value)
    walk.left -= length
    if length > _LONG:
        sample = tuple.__getitem__(value, slice(None, None, length // _SAMPLE | 1))
        return type(value), length, frozenset([walk.of(one) for one in sample])
    if length > 1 and set(map(type, tuple.__iter__(value))) == _STRINGS:  # a batch, as data loaders put them together
        return type(value), length
    return type(value), *[walk.of(one) for one in tuple.__iter__(value)]


def _list(value: Any, walk: _Walk) -> Any:
    length = list.__len__(value)
    sample = list.__getitem__(value, slice(None, None, length // _SAMPLE | 1)) if length > _LONG else value
    return _listed(value, walk, length, sample if type(sample) is list else list(list.__iter__(value)))


def _deque(value: Any, walk: _Walk) -> Any:
    length = deque.__len__(value)
    return _listed(value, walk, length, list(islice(deque.__iter__(value), _SAMPLE if length > _LONG else None)))


def _listed(value: Any, walk: _Walk, length: int, sample: list[Any]) -> Any:
    try:
        types = set(map(type, sample))
    except TypeError:  # one has no hash
        types = set()
    if types and types <= _BATCHES:
        return (type(value), frozenset(), False) if walk.within else (type(value), frozenset(types))
    walk.left -= len(sample)
    if types == _BOOL:
        return type(value), *(sample if length <= _SHORT else [one for one in (False, True) if one in value])
    kinds = [str if type(one) is str else walk.of(one) for one in sample]
    told = frozenset(kinds)
    if walk.within:
        left = told - _COUNTLESS
        return type(value), left, length > 1 and bool(left)
    if len(told) > 1 and length <= _SHORT:
        return type(value), *kinds
    is_counted = length > 1 and not told & _COUNTLESS
    return (type(value), told, length) if is_counted else (type(value), told)


def _set(value: Any, walk: _Walk) -> Any:
    walk.left -= min(len(value), _SAMPLE)
    some = islice(value, _SAMPLE) if len(value) > _LONG else value
    return type(value), frozenset([type(one) if some is not value else walk.of(one) for one in some])


def _dict(value: Any, walk: _Walk) -> Any:
    return type(value), _items(dict.items(value), dict.__len__(value), walk)


def _proxy(value: Any, walk: _Walk) -> Any:
    return _items(value.items(), len(value), walk)


def _items(items: Iterable[tuple[Any, Any]], length: int, walk: _Walk) -> Any:
    if length > _LONG:
        walk.left -= _SAMPLE
        some = list(islice(items, _SAMPLE))
        return dict, frozenset([type(name) for name, _ in some]), frozenset([walk.of(one) for _, one in some])
    walk.left -= length
    return frozenset([(name if type(name) is str else _key(name, walk), walk.of(one)) for name, one in items])


def _key(name: Any, walk: _Walk) -> Any:
    kind = type(name)
    if kind in _NUMBERS or kind is bytes:
        return kind if walk.within else name
    return walk.of(name)


def _slice(value: Any, walk: _Walk) -> Any:
    return slice, walk.of(value.start), walk.of(value.stop), walk.of(value.step)


def _namespace(value: Any, walk: _Walk) -> Any:
    return type(value), _dict(value.__dict__, walk)


def _fields(value: Any, walk: _Walk) -> Any:
    own = getattr(value, "__dict__", None)
    if own is None:  # it has slots
        own = {one.name: getattr(value, one.name, None) for one in fields(value)}
    return type(value), frozenset(zip(own, walk.all_within(own.values()), strict=True))


def _object(value: Any, walk: _Walk) -> Any:
    own = attributes_of(value)
    walk.left -= len(own)
    kinds = walk.all_within(one for _, one in own[:_LONG])
    return type(value), frozenset(zip((name for name, _ in own), kinds, strict=False))


def _with_attributes(handle: Handle, value: Any, walk: _Walk) -> Any:
    """Tell a user's container by what is in it, and by its attributes."""
    return handle(value, walk), _object(value, walk)


def _of_too_much(value: Any) -> Any:
    """Tell what there is no more room for: functions by their code, objects by being the same one, else by type."""
    kind = type(value)
    if kind is FunctionType:
        return value.__code__
    if kind is MethodType:
        return _of_too_much(value.__func__), _of_too_much(value.__self__)
    try:
        return kind, Same(value)
    except TypeError:  # such as lists, to which nothing refers weakly
        return kind


_DEEP, _MOST = 40, 4000
"""How deep it is looked into what is in one another, and at how much in all."""
_LONG, _SAMPLE = 1024, 64
"""Elements of a container that are all looked at, and how many of one that has more."""
_SHORT = 8
"""Elements of a list whose order is told."""
_AGAIN = object()
_BOOL, _STRINGS = {bool}, {str}
_NUMBERS = frozenset((type(None), int, float, complex, type(...)))
_BATCHES = frozenset((str, int, float, complex))
_COUNTLESS = frozenset((*_BATCHES, bool, True, False))
"""Kinds of elements of which any number may come: a batch of them."""
_TYPE: Ways = type, False, None
_CONTAINERS = dict, tuple, list, set, frozenset, deque
_OPEN = frozenset((
    "builtins", "collections", "_collections", "_collections_abc", "abc", "typing", "types", "functools", "_functools",
    "operator", "_operator", "argparse", "dataclasses", "contextlib", "enum", "numbers",
))  # fmt: skip
"""Packages of Python's own library whose objects are looked into, and so are those of classes made from them."""

_LEAVES: tuple[tuple[Any, Leaf], ...] = (
    (Enum, _member),
    (str, _string),
    (type, _class),
    (PurePath | np.dtype | np.ufunc | re.Pattern, _itself),
    (MethodDescriptorType | WrapperDescriptorType | ClassMethodDescriptorType, _itself),
    (GetSetDescriptorType | MemberDescriptorType, _itself),
    (ModuleType, Same),
    (BaseException, type),
    (np.ndarray, _array),
)
_HANDLES: tuple[tuple[Any, Handle], ...] = (
    (dict, _dict),
    (tuple, _tuple),
    (list, _list),
    (deque, _deque),
    (set | frozenset, _set),
    (FunctionType, _called),
    (MethodType, _method),
    (functools.partial, _partial),
    (BuiltinFunctionType | MethodWrapperType, _builtin),
    (operator.methodcaller | operator.attrgetter | operator.itemgetter, _operator),
    (weakref.ref, _referred),
    (slice, _slice),
    (MappingProxyType, _proxy),
    (SimpleNamespace, _namespace),
)
