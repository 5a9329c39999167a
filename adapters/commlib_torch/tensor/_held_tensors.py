"""Held tensors: find the tensors that are still referenced after a model's call, by reference counts."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.tensor_parallel.run.caches import count_cached


def find_held(tensors: list[Tensor], wanted: set[int], outside: set[int], roots: Iterable[Any]) -> set[int]:
    """Return the ids of tensors that others hold, except caches. Exact for references from Python objects.

    tensors: all of them, held exactly as often as this list holds them on our side. wanted: ids of interest. outside:
    ids of older tensors, which are held in any case. roots: where to look for caches. Garbage is collected before a
    tensor counts as held.
    """
    held = _find_held(tensors, wanted - outside, {})
    if not (held or wanted & outside):
        return held
    caches = count_cached(roots, lambda value: isinstance(value, Tensor), nn.Module)
    held = _find_held(tensors, held, caches)
    for generation in (1, 2):
        if held:
            gc.collect(generation)
            held = _find_held(tensors, held, caches)
    return held | {key for key in wanted & outside if not caches.get(key)}


def _find_held(tensors: list[Tensor], wanted: set[int], caches: Mapping[int, int]) -> set[int]:
    own = Counter(map(id, tensors))
    return {
        key
        for key, tensor, count in zip(map(id, tensors), tensors, _references(tensors), strict=True)
        if key in wanted and count - (_FROM_BELOW if _is_used_below(tensor) else 0) > own[key] + caches.get(key, 0)
    }


def _references(tensors: list[Any]) -> list[int]:
    """Return the number of Python references to each element of a list, including the list's."""
    own, probe = Counter(map(id, tensors)), object()
    every = [*tensors, probe]
    *counts, idle = map(sys.getrefcount, every)  # without Python frames, which may hold references
    return [count - (idle - 2) - own[id(one)] for count, one in zip(counts, tensors, strict=True)]


def _is_used_below(tensor: Tensor) -> bool:
    """Return whether PyTorch holds a tensor as the base of a view."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and count() > 1


_base = torch.empty(1)
_view = _base.view(1)
_FROM_BELOW = _references([_base])[0] - 2  # the name and the list
"""The references that PyTorch itself has to a base: none or one, depending on its version."""
del _base, _view
