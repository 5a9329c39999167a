"""Caches: tensors that a model keeps for its next call, such as keys and values of this rank's heads."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from commlib.snapshot.contents import elements_of, items_of
from commlib.snapshot.trial_run import is_users

_MOST = 100_000
"""Maximum number of objects searched."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, FunctionType, MethodType)
_NAME = re.compile("[Cc]aches?(?![a-z])|CACHE")
"""Matches k_cache, KVCache and DynamicCache, but not `cached`, which may name a module."""


def count_cached(roots: Iterable[Any], is_tensor: Callable[[Any], bool], layer: type) -> Mapping[int, int]:
    """Return how often caches hold each tensor, by its id. layer: the framework's class of layers.

    Caches are found by name: an object by the name of its class or a base class; an attribute, a buffer or an entry of
    a dict by its key.
    """
    counts = Counter[int]()
    seen: dict[tuple[int, bool], Any] = {}
    waiting = [(root, False) for root in roots]
    while waiting and len(seen) < _MOST:
        value, inside = waiting.pop()
        if is_tensor(value):
            counts[id(value)] += inside
            continue
        inside = inside or any(_is_cache(kind.__name__) for kind in type(value).__mro__)
        if isinstance(value, _PLAIN) or (id(value), inside) in seen:
            continue
        seen[id(value), inside] = value
        waiting += [(one, inside or _is_cache(name)) for name, one in _entries(value, layer)]
    return counts


def _is_cache(name: Any) -> bool:
    return isinstance(name, str) and _NAME.search(name) is not None


def _entries(value: Any, layer: type) -> list[tuple[Any, Any]]:
    """Return (name, object) for the contents of an object."""
    if isinstance(value, dict):
        own = list(items_of(value))
    elif isinstance(value, MappingProxyType):
        own = list(value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        own = list(zip(value._fields, elements_of(value), strict=True))
    elif isinstance(value, list | tuple | deque | set | frozenset):
        own = [("", one) for one in elements_of(value)]
    else:
        own = []
    if not (isinstance(value, layer) or is_users(value)):
        return own
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    own += [(name, getattr(value, name, None)) for name in slots if not name.startswith("__")]
    return own + list(getattr(value, "__dict__", {}).items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
