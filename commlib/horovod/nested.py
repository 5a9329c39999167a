"""Nested: walk over nested state, such as what an optimizer's `state_dict()` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of a leaf that was taken out."""


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` of each leaf of its dicts, lists and tuples, called from the first to the last.

    What is derived from these types, such as a named tuple, is a leaf.
    """
    if type(value) is dict:
        return {key: map_leaves(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)


def take_out(value: Any, kind: type[T]) -> tuple[Any, list[T]]:
    """Return (`value` with a `Hole` for each leaf of this kind; these leaves, in order)."""
    leaves: list[T] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, kind):
            return leaf
        leaves.append(leaf)
        return Hole()

    return map_leaves(value, take), leaves


def put_back(structure: Any, leaves: Iterable[Any]) -> Any:
    """Undo `take_out`: return `structure` with a leaf in each hole. Raises ValueError where their numbers differ."""
    rest = list(leaves)
    rest.reverse()
    holes = take_out(structure, Hole)[1]
    if len(holes) != len(rest):
        raise ValueError(f"put_back: {len(rest)} leaves for {len(holes)} holes")
    return map_leaves(structure, lambda leaf: rest.pop() if isinstance(leaf, Hole) else leaf)
