"""Call signatures: describe an argument, so that arguments for which a model may run other operations differ.

The walk through an argument is bounded, because models are called often. It runs no user code.
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

from commlib.snapshot.contents import attributes_of, list_held, may_have_attributes


class SameObject:
    """An object compared by identity. It is not kept alive, and a new object at its address is not equal to it."""

    __slots__ = ("_at", "_weak_value")

    def __init__(self, value: Any) -> None:
        self._at, self._weak_value = id(value), weakref.ref(value)

    def __hash__(self) -> int:
        return self._at

    def __eq__(self, other: object) -> bool:
        if type(other) is not SameObject or self._at != other._at:
            return False
        target = self._weak_value()
        return target is not None and target is other._weak_value()


class ObjectContents(NamedTuple):
    """A framework's description of an object, and the objects inside it, which are described, too."""

    mark: Hashable
    held: tuple[Any, ...]


def kind_of(value: Any, kind_of_other: Callable[[Any], Hashable] = lambda _: None) -> Hashable:
    """Return a description that separates an argument from arguments of other kinds: its type, and the types inside it.

    Flags, strings, paths, members of an enumeration and classes are described by value; functions by their code and by
    closures, defaults, and the object or class of a method; objects by their attributes. Strings in lists, which may be
    a batch, numbers, and how many there are, change with every call and are left out. Short lists of flags or of
    several kinds are described in order; lists of tensors and other objects by their length, but inside functions and
    objects only by whether they have several elements, because histories grow. Long lists are described by a sample.

    kind_of_other: a framework's description of its own objects and of their contents; None for unknown objects. An
    object with too many contents is described by its identity.
    """
    kind: Any = type(value)
    try:
        leaf, needs_more, _ = _handlers_of(kind)
    except TypeError:  # a class without a hash
        return SameObject(kind)
    content: Hashable = None
    if leaf is not None:
        content = leaf(value)
    elif needs_more:
        content = kind_of_other(value)
    return (
        content
        if content is not None and type(content) is not ObjectContents
        else _ArgumentWalk(kind_of_other).of(value)
    )


class _ArgumentWalk:
    """A walk through an argument.

    other: the framework's description. within: whether it is inside a function or object. budget: remaining budget.
    """

    __slots__ = ("_depth", "_signatures", "_temporaries", "budget", "other", "within")

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self.other, self.within, self.budget = other, False, _MOST
        self._depth = 0
        self._signatures: dict[int, Any] = {}
        self._temporaries: list[Any] = []

    def of(self, value: Any) -> Any:
        """Return the description of a value. A reference to an enclosing value is described by its depth."""
        kind: Any = type(value)
        try:
            leaf, needs_more, handle = _handlers_of(kind)
        except TypeError:
            return SameObject(kind)
        if leaf is not None:
            return leaf(value)
        if needs_more:
            content = self.other(value)
            if type(content) is ObjectContents:
                value, handle = self.keep(content), _holding
            elif content is not None:
                return content
        if handle is None:
            return type(value)
        cached = self._signatures.get(id(value))
        if cached is not None:
            return cached
        if self.budget <= 0 or self._depth == _DEEP:
            return _beyond_budget(value)
        self._signatures[id(value)] = _AGAIN, self._depth
        self._depth += 1
        self.budget -= 1
        signature = handle(value, self)
        self._depth -= 1
        self._signatures[id(value)] = signature
        return signature

    def keep(self, value: Any) -> Any:
        """Keep a temporary value alive, and return it: a new object could reuse its id."""
        self._temporaries.append(value)
        return value

    def all_within(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return descriptions of the contents of a function or an object."""
        before, self.within = self.within, True
        signatures = tuple([self.of(one) for one in values])
        self.within = before
        return signatures


Leaf = Callable[[Any], Any]
Handle = Callable[[Any, _ArgumentWalk], Any]
Ways = tuple[Leaf | None, bool, Handle | None]
"""A function that describes a value; else whether the framework's is tried first, and a function that walks it."""


@functools.lru_cache(1000)
def _handlers_of(kind: Any) -> Ways:
    """Return the describing functions for a type. No value's `__class__` is read: some values belong to a trace."""
    if kind in _NUMBERS:
        return _TYPE
    if kind in (bool, str, np.bool_):
        return _value, False, None
    leaf = next((leaf for base, leaf in _LEAVES if issubclass(kind, base)), None)
    if leaf is None and (kind.__module__ == "typing" or kind in (GenericAlias, UnionType)):
        leaf = _value_or_type
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
    """Return whether objects of a class are opaque: files, locks, loggers and others of the standard library."""
    packages = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return not packages.isdisjoint(sys.stdlib_module_names - _OPEN)


def _class(value: Any) -> Any:
    return SameObject(value) if type(value).__hash__ is None else value


def _value(value: Any) -> Any:
    return value


def _value_or_type(value: Any) -> Any:
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


def _holding(value: ObjectContents, walk: _ArgumentWalk) -> Any:
    return value.mark, *walk.all_within(value.held)


def _function(value: Any, walk: _ArgumentWalk) -> Any:
    """Describe a function by its code, which differs between the lambdas of a line, and by its contents."""
    return value.__code__, *walk.all_within(list_held(value))


def _method(value: Any, walk: _ArgumentWalk) -> Any:
    return MethodType, *walk.all_within((value.__func__, value.__self__))


def _partial(value: Any, walk: _ArgumentWalk) -> Any:
    members = value.func, *value.args, *value.keywords.values()
    return type(value), *value.keywords, *walk.all_within(members)


def _builtin(value: Any, walk: _ArgumentWalk) -> Any:
    owner = value.__self__
    if owner is None or issubclass(type(owner), type | ModuleType):
        return value
    return type(value), value.__name__, *walk.all_within((owner,))


def _operator(value: Any, walk: _ArgumentWalk) -> Any:
    return type(value), *walk.all_within(walk.keep(value.__reduce__()))


def _reference(value: Any, walk: _ArgumentWalk) -> Any:
    return type(value), walk.of(walk.keep(value()))


def _tuple(value: Any, walk: _ArgumentWalk) -> Any:
    length = tuple.__len__(value)
    walk.budget -= length
    if length > _LONG:
        sample = tuple.__getitem__(value, slice(None, None, length // _SAMPLE | 1))
        return type(value), length, frozenset([walk.of(one) for one in sample])
    if length > 1 and set(map(type, tuple.__iter__(value))) == _STRINGS:  # a batch, as collated by data loaders
        return type(value), length
    return type(value), *[walk.of(one) for one in tuple.__iter__(value)]


def _list(value: Any, walk: _ArgumentWalk) -> Any:
    length = list.__len__(value)
    sample = list.__getitem__(value, slice(None, None, length // _SAMPLE | 1)) if length > _LONG else value
    return _elements(value, walk, length, sample if type(sample) is list else list(list.__iter__(value)))


def _deque(value: Any, walk: _ArgumentWalk) -> Any:
    length = deque.__len__(value)
    return _elements(value, walk, length, list(islice(deque.__iter__(value), _SAMPLE if length > _LONG else None)))


def _elements(value: Any, walk: _ArgumentWalk, length: int, sample: list[Any]) -> Any:
    try:
        types = set(map(type, sample))
    except TypeError:  # one has no hash
        types = set()
    if types and types <= _BATCHES:
        return (type(value), frozenset(), False) if walk.within else (type(value), frozenset(types))
    walk.budget -= len(sample)
    if types == _BOOL:
        return type(value), *(sample if length <= _SHORT else [one for one in (False, True) if one in value])
    kinds = [str if type(one) is str else walk.of(one) for one in sample]
    distinct = frozenset(kinds)
    if walk.within:
        countable = distinct - _COUNTLESS
        return type(value), countable, length > 1 and bool(countable)
    if len(distinct) > 1 and length <= _SHORT:
        return type(value), *kinds
    is_counted = length > 1 and not distinct & _COUNTLESS
    return (type(value), distinct, length) if is_counted else (type(value), distinct)


def _set(value: Any, walk: _ArgumentWalk) -> Any:
    walk.budget -= min(len(value), _SAMPLE)
    some = islice(value, _SAMPLE) if len(value) > _LONG else value
    return type(value), frozenset([type(one) if some is not value else walk.of(one) for one in some])


def _dict(value: Any, walk: _ArgumentWalk) -> Any:
    return type(value), _items(dict.items(value), dict.__len__(value), walk)


def _proxy(value: Any, walk: _ArgumentWalk) -> Any:
    return _items(value.items(), len(value), walk)


def _items(items: Iterable[tuple[Any, Any]], length: int, walk: _ArgumentWalk) -> Any:
    if length > _LONG:
        walk.budget -= _SAMPLE
        some = list(islice(items, _SAMPLE))
        return dict, frozenset([type(name) for name, _ in some]), frozenset([walk.of(one) for _, one in some])
    walk.budget -= length
    return frozenset([(name if type(name) is str else _key(name, walk), walk.of(one)) for name, one in items])


def _key(name: Any, walk: _ArgumentWalk) -> Any:
    kind = type(name)
    if kind in _NUMBERS or kind is bytes:
        return kind if walk.within else name
    return walk.of(name)


def _slice(value: Any, walk: _ArgumentWalk) -> Any:
    return slice, walk.of(value.start), walk.of(value.stop), walk.of(value.step)


def _namespace(value: Any, walk: _ArgumentWalk) -> Any:
    return type(value), _dict(value.__dict__, walk)


def _fields(value: Any, walk: _ArgumentWalk) -> Any:
    own = getattr(value, "__dict__", None)
    if own is None:  # it has slots
        own = {one.name: getattr(value, one.name, None) for one in fields(value)}
    return type(value), frozenset(zip(own, walk.all_within(own.values()), strict=True))


def _object(value: Any, walk: _ArgumentWalk) -> Any:
    own = attributes_of(value)
    walk.budget -= len(own)
    kinds = walk.all_within(one for _, one in own[:_LONG])
    return type(value), frozenset(zip((name for name, _ in own), kinds, strict=False))


def _with_attributes(handle: Handle, value: Any, walk: _ArgumentWalk) -> Any:
    """Describe a user's container by its contents and its attributes."""
    return handle(value, walk), _object(value, walk)


def _beyond_budget(value: Any) -> Any:
    """Describe a value beyond the budget: functions by their code, objects by identity, others by type."""
    kind = type(value)
    if kind is FunctionType:
        return value.__code__
    if kind is MethodType:
        return _beyond_budget(value.__func__), _beyond_budget(value.__self__)
    try:
        return kind, SameObject(value)
    except TypeError:  # such as lists, which have no weak references
        return kind


_DEEP, _MOST = 40, 4000
"""Maximum depth of the walk, and maximum number of visited values."""
_LONG, _SAMPLE = 1024, 64
"""Size up to which all elements of a container are visited, and the sample size for larger ones."""
_SHORT = 8
"""Maximum length of a list that is described in order."""
_AGAIN = object()
_BOOL, _STRINGS = {bool}, {str}
_NUMBERS = frozenset((type(None), int, float, complex, type(...)))
_BATCHES = frozenset((str, int, float, complex))
_COUNTLESS = frozenset((*_BATCHES, bool, True, False))
"""Kinds of elements whose number may vary: a batch of them."""
_TYPE: Ways = type, False, None
_CONTAINERS = dict, tuple, list, set, frozenset, deque
_OPEN = frozenset((
    "builtins", "collections", "_collections", "_collections_abc", "abc", "typing", "types", "functools", "_functools",
    "operator", "_operator", "argparse", "dataclasses", "contextlib", "enum", "numbers",
))  # fmt: skip
"""Packages of the standard library whose objects are visited, and so are objects of derived classes."""

_LEAVES: tuple[tuple[Any, Leaf], ...] = (
    (Enum, _member),
    (str, _string),
    (type, _class),
    (PurePath | np.dtype | np.ufunc | re.Pattern, _value),
    (MethodDescriptorType | WrapperDescriptorType | ClassMethodDescriptorType, _value),
    (GetSetDescriptorType | MemberDescriptorType, _value),
    (ModuleType, SameObject),
    (BaseException, type),
    (np.ndarray, _array),
)
_HANDLES: tuple[tuple[Any, Handle], ...] = (
    (dict, _dict),
    (tuple, _tuple),
    (list, _list),
    (deque, _deque),
    (set | frozenset, _set),
    (FunctionType, _function),
    (MethodType, _method),
    (functools.partial, _partial),
    (BuiltinFunctionType | MethodWrapperType, _builtin),
    (operator.methodcaller | operator.attrgetter | operator.itemgetter, _operator),
    (weakref.ref, _reference),
    (slice, _slice),
    (MappingProxyType, _proxy),
    (SimpleNamespace, _namespace),
)
