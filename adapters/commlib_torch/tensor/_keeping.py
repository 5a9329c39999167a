"""Keeping: which tensors somebody holds when a model's call has ended, told by counting who refers to them."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from commlib.functional.unnoticed import is_users

_MOST = 100_000
"""Objects in which caches are looked for."""


def held(tensors: list[Tensor], wanted: set[int], outside: set[int], roots: Iterable[Any]) -> set[int]:
    """Return the ids of those tensors that others hold, but for caches. Exact where Python's objects hold them.

    tensors: all of them, as often as this list holds them, and nobody else on our side. wanted: ids of those that
    count. outside: of those that were there before, which somebody holds anyway. roots: where caches may be. What
    waits to be collected is, before it is taken for somebody.
    """
    found = _held(tensors, wanted - outside, {})
    if not (found or wanted & outside):
        return found
    caches = _in_caches(roots)
    found = _held(tensors, found, caches)
    for generation in (1, 2):
        if found:
            gc.collect(generation)
            found = _held(tensors, found, caches)
    return found | {key for key in wanted & outside if not caches.get(key)}


def _held(tensors: list[Tensor], wanted: set[int], caches: Mapping[int, int]) -> set[int]:
    own = Counter(map(id, tensors))
    return {
        key
        for key, tensor, count in zip(map(id, tensors), tensors, _references(tensors), strict=True)
        if key in wanted and count - (_FROM_BELOW if _is_used_below(tensor) else 0) > own[key] + caches.get(key, 0)
    }


def _references(tensors: list[Any]) -> list[int]:
    """Return how many references of Python there are to what a list holds, that of the list included."""
    own, probe = Counter(map(id, tensors)), object()
    every = [*tensors, probe]
    *counts, idle = map(sys.getrefcount, every)  # no call of Python between, which counts now and then
    return [count - (idle - 2) - own[id(one)] for count, one in zip(counts, tensors, strict=True)]


def _is_used_below(tensor: Tensor) -> bool:
    """Return whether PyTorch itself holds a tensor, as the base of a view."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and count() > 1


_base = torch.empty(1)
_view = _base.view(1)
_FROM_BELOW = _references([_base])[0] - 2  # the name, and the list
"""References that PyTorch has to what it holds itself: by its version none, or one."""
del _base, _view


def _in_caches(roots: Iterable[Any]) -> Mapping[int, int]:
    """Return how often caches hold tensors, by their ids.

    A cache is what is called so: an object by the name of its class, or of one that it inherits from, an attribute, a
    buffer or an entry of a dict by its own.
    """
    found = Counter[int]()
    seen: dict[tuple[int, bool], Any] = {}
    waiting = [(root, False) for root in roots]
    while waiting and len(seen) < _MOST:
        value, inside = waiting.pop()
        if isinstance(value, Tensor):
            found[id(value)] += inside
            continue
        inside = inside or any(_is_cache(kind.__name__) for kind in type(value).__mro__)
        if isinstance(value, _PLAIN) or (id(value), inside) in seen:
            continue
        seen[id(value), inside] = value
        waiting += [(one, inside or _is_cache(name)) for name, one in _entries(value)]
    return found


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, FunctionType, MethodType, torch.dtype)


_CACHE = re.compile("[Cc]aches?(?![a-z])|CACHE")
"""Of k_cache, KVCache and DynamicCache; not of what is called cached, as a module may be."""


def _is_cache(name: Any) -> bool:
    return isinstance(name, str) and _CACHE.search(name) is not None


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Return (name, object) of what an object holds."""
    if isinstance(value, Mapping):
        own = list(value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        own = list(zip(value._fields, value, strict=True))
    elif isinstance(value, Sequence | set | frozenset):
        own = [("", one) for one in value]
    else:
        own = []
    if not (isinstance(value, nn.Module) or is_users(value)):
        return own
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    own += [(name, getattr(value, name, None)) for name in slots if not name.startswith("__")]
    return own + list(getattr(value, "__dict__", {}).items())


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
