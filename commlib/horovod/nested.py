"""Walk over nested state, such as what an optimizer's `state_dict()` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` of each leaf of its dicts, lists and tuples, called from the first to the last.

    What is derived from these types, such as a named tuple, is a leaf.
    """
    if type(value) is dict:
        return {key: map_leaves(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)
