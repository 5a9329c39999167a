"""Restoring objects: the function that restores an object in place, and the objects inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

EMPTY = object()
"""Marks an empty slot."""


@dataclass(frozen=True, slots=True)
class ObjectSnapshot:
    """The function that restores an object, and the objects inside it.

    restore: returns, if it fails, a description of the changed part.
    """

    restore: Callable[[], object] | None = None
    inside: Iterable[Any] = ()


def restore_all(restores: Iterable[Callable[[], object] | None]) -> object:
    """Run all restore functions; return the first failure, or None."""
    every = [restore() for restore in restores if restore is not None]
    return next((one for one in every if one is not None), None)


def are_same_objects(now: list[Any], before: list[Any]) -> bool:
    """Return whether both lists hold the same objects, by identity: `==` of users' classes is not called."""
    return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))
