"""Nested state: walk over nested state, such as an optimizer's `state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeafPlaceholder:
    """The place of a removed leaf."""


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to each leaf of its dicts, lists and tuples, from first to last.

    Instances of subclasses of these types, such as named tuples, are leaves.
    """
    if type(value) is dict:
        return {key: map_leaves(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)


def take_out(value: Any, kind: type[T]) -> tuple[Any, list[T]]:
    """Return (`value` with a `LeafPlaceholder` for each leaf of this type; the removed leaves, in order)."""
    leaves: list[T] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, kind):
            return leaf
        leaves.append(leaf)
        return LeafPlaceholder()

    return map_leaves(value, take), leaves


def put_back(structure: Any, leaves: Iterable[Any]) -> Any:
    """Undo `take_out`: return `structure` with a leaf in each hole. Raises ValueError if the numbers differ."""
    rest = list(leaves)
    rest.reverse()
    holes = take_out(structure, LeafPlaceholder)[1]
    if len(holes) != len(rest):
        raise ValueError(f"put_back: {len(rest)} leaves for {len(holes)} holes")
    return map_leaves(structure, lambda leaf: rest.pop() if isinstance(leaf, LeafPlaceholder) else leaf)
