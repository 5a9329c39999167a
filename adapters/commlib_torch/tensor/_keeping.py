"""Keeping: which tensors somebody holds when a model's call has ended, told by counting who refers to them."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.tensor_parallel.run.caches import in_caches


def held(tensors: list[Tensor], wanted: set[int], outside: set[int], roots: Iterable[Any]) -> set[int]:
    """Return the ids of those tensors that others hold, but for caches. Exact where Python's objects hold them.

    tensors: all of them, as often as this list holds them, and nobody else on our side. wanted: ids of those that
    count. outside: of those that were there before, which somebody holds anyway. roots: where caches may be. What
    waits to be collected is, before it is taken for somebody.
    """
    found = _held(tensors, wanted - outside, {})
    if not (found or wanted & outside):
        return found
    caches = in_caches(roots, lambda value: isinstance(value, Tensor), nn.Module)
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
