"""Nested tensors: the tensors in the arguments and the results of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def tensors_in(value: Any, known: dict[int, tuple[Any, list[Tensor]]] | None = None) -> list[Tensor]:
    """Return the tensors in nested sequences, mappings and objects with fields, in order.

    known: the visited objects. An object that contains itself, such as a tree node with a reference to its parent, is
    visited once.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = value
    elif fields := getattr(value, "__dataclass_fields__", ()):
        parts = [getattr(value, name) for name in fields]
    else:
        return []
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = value, []
        known[id(value)] = value, [tensor for part in parts for tensor in tensors_in(part, known)]
    return known[id(value)][1]
